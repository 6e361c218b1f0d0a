"""The start-up check that names still come out as they always did.

Facts (RFC 8949, what canonical CBOR writes): definite lengths, the shortest head, no tag, equal
objects written out again each time. A release of cbor2 that writes anything else would name every
block anew: nothing kept before would be found, and nothing shared with an engine that has another
release.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata

import cbor2

from ebbtide.allocator import cbor
from ebbtide.errors import ConfigError

# One object written twice: an encoder that shares values or strings would refer back to the first.
_TWICE = ("mm", "an identifier of more than 24 bytes", -9)

_VECTORS: tuple[tuple[object, str], ...] = (
    (0, "00"),
    (23, "17"),
    (24, "1818"),
    (255, "18ff"),
    (256, "190100"),
    (65535, "19ffff"),
    (65536, "1a00010000"),
    (2**31 - 1, "1a7fffffff"),
    (2**32 - 1, "1affffffff"),
    (2**32, "1b0000000100000000"),
    (2**63 - 1, "1b7fffffffffffffff"),
    (2**64 - 1, "1bffffffffffffffff"),
    (-1, "20"),
    (-24, "37"),
    (-25, "3818"),
    (-256, "38ff"),
    (-257, "390100"),
    (-65536, "39ffff"),
    (-65537, "3a00010000"),
    (-(2**32), "3affffffff"),
    (-(2**32) - 1, "3b0000000100000000"),
    (-(2**63), "3b7fffffffffffffff"),
    (None, "f6"),
    ((), "80"),
    ([1, (2,)], "82018102"),
    (b"", "40"),
    ("", "60"),
    ("vllm-none-hash", "6e766c6c6d2d6e6f6e652d68617368"),
    ("é", "62c3a9"),
    ("\U0001f30a", "64f09f8c8a"),
    *((b"\xab" * n, head + "ab" * n) for n, head in ((23, "57"), (24, "5818"), (256, "590100"))),
    *(("s" * n, head + "73" * n) for n, head in ((23, "77"), (24, "7818"), (256, "790100"))),
    *(((7,) * n, head + "07" * n) for n, head in ((23, "97"), (24, "9818"), (256, "990100"))),
    ((b"\x00" * 16, (1,), None), "8350" + "00" * 16 + "8101f6"),
    (
        (b"\xff" * 32, (23, 24), (("mm", "a", -9),)),
        "835820" + "ff" * 32 + "8217181881" + "83626d6d616128",
    ),
    (
        (_TWICE, _TWICE),
        "82" + ("83626d6d7823" + _TWICE[1].encode().hex() + "28") * 2,
    ),
)

# Token counts whose bytes pass 4096 and 32768, sizes near which releases of cbor2 failed, and the
# SHA-256 of the block that `check_encoder` builds from so many.
_LONG_VECTORS = (
    (1365, "8d29ab2d7bfeed0c612dcedd76f258b110b589a6ba86d1e5497430c9efdf14cd"),
    (4096, "3059adabbb1519f9ea0b1eda0143b4d9ca728cf16b1054ab2158879d2ab2c379"),
    (16384, "aa3321ec5ed33564b51682b3960ae68f3fd938b591e78ee3846769788c5eb37a"),
)

# The heads with four bytes of length: too long to keep.
_WIDE = 65536


@functools.cache
def check_encoder_once() -> None:
    """`check_encoder`, until it has passed in this process."""
    check_encoder()


def check_encoder() -> None:
    """Raise ConfigError unless cbor2 and the fast encoding yield the bytes of fixed vectors.

    The first call that names a block or a root with a CBOR algorithm comes through here. About
    10 ms.
    """
    for item, expected in _VECTORS:
        _expect(repr(item), _dumps(item), bytes.fromhex(expected))
    _expect(f"{_WIDE} bytes", _dumps(bytes(_WIDE)), b"\x5a\0\1\0\0" + bytes(_WIDE))
    _expect(f"{_WIDE} zeros", _dumps((0,) * _WIDE), b"\x9a\0\1\0\0" + bytes(_WIDE))
    for length, digest in _LONG_VECTORS:
        tokens = [(i * i * 977) % 2**31 >> (i % 4 * 8) for i in range(length)]
        block = _dumps((bytes(32), tuple(tokens), None))
        _expect(f"{length} tokens", hashlib.sha256(block).digest(), bytes.fromhex(digest))
        words = cbor.as_words(tokens)
        encoded = b"" if words is None else cbor.encode_runs(words, length)[0]
        before = b"\x83\x58\x20" + bytes(32) + cbor.head(cbor.TUPLE, length)
        _expect(f"{length} tokens, fast path", before + encoded + cbor.NONE, block)


def _dumps(item: object) -> bytes:
    try:
        return cbor2.dumps(item, canonical=True)
    except (cbor2.CBOREncodeError, TypeError, ValueError, OverflowError) as error:
        raise _refusal(repr(item), "bytes", f"{type(error).__name__}: {error}") from error


def _expect(item: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise _refusal(item, expected.hex(), found.hex())


def _refusal(item: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        "hash self-test failed: the CBOR encoder yields other bytes than its vectors",
        next_step="Install a cbor2 release that this version was tested with",
        item=item[:64],
        expected=expected[:64],
        found=found[:64],
        cbor2=importlib.metadata.version("cbor2"),
    )
