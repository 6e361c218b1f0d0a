"""The hash chain that names blocks: `h[i] = digest(serialise((h[i-1], tokens, extra keys)))`.

Facts (as vLLM 0.32). The parent of block 0 is the root, `digest(serialise(seed text))`. Only full
blocks are named. The name of a block stands for its tokens *and all before them*. `sha256` and
`xxhash` serialise with pickle, `sha256_cbor` and `xxhash_cbor` with canonical CBOR. Pickled bytes
depend on Python's version and on object identity, so names that leave a process use a CBOR one.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.allocator import cbor, native
from ebbtide.allocator.algorithms import DEFAULT_ALGORITHM as DEFAULT_ALGORITHM
from ebbtide.allocator.algorithms import HASH_BYTES, HashAlgorithm, hash_algorithm
from ebbtide.allocator.encoder_check import check_encoder_once
from ebbtide.allocator.extra_keys import block_extra_keys
from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ebbtide.allocator.extra_keys import ExtraKeys, LoraAdapter, MultiModalItem

logger = logging.getLogger(__name__)

DEFAULT_SEED = "vllm-none-hash"
SEED_VARIABLE = "PYTHONHASHSEED"
GROUP_BYTES = 4

# Below this many blocks one encoder call per block is faster than the fixed cost of the arrays.
_FAST_PATH_BLOCKS = 16
# Blocks encoded at a time: the arrays of 512 blocks of 16 stay in the processor's cache.
_RUN_BLOCKS = 512


def root_seed(algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The seed text of this process's chains, as vLLM 0.32 chooses it.

    The *text* of PYTHONHASHSEED if that is set ("0", "00", "" and "random" are four seeds), else a
    fixed text for SHA-256, else 64 random hex digits that stay the same within the process.
    """
    text = os.environ.get(SEED_VARIABLE)
    if text is not None:
        return text
    return DEFAULT_SEED if hash_algorithm(algorithm).reproducible_root else _random_seed()


@functools.cache
def _random_seed() -> str:
    logger.warning(
        "The root of xxhash chains is random in this process: no other process will find its "
        "blocks. Set %s to the same text in every process, or use %s.",
        SEED_VARIABLE,
        DEFAULT_ALGORITHM,
    )
    return os.urandom(32).hex()


def none_hash(algorithm: str = DEFAULT_ALGORITHM, seed: str | None = None) -> bytes:
    """The root: the parent of every first block. `seed` None means `root_seed(algorithm)`.

    Two parties share blocks only when their roots are equal. Raises ConfigError for an unknown
    algorithm, an encoder that fails its self-test or a wrong EBBTIDE_PURE, and MisuseError for a
    seed that is not text. Call it at start: what cannot work shows here.
    """
    if seed is None:
        seed = root_seed(algorithm)
    elif type(seed) is not str:
        raise MisuseError("a hash seed is text", type=type(seed).__name__)
    chosen = _checked(algorithm)
    return chosen.new(chosen.serialise(seed)).digest()


def _checked(algorithm: str) -> HashAlgorithm:
    """The algorithm of that name; the first use of CBOR in a process tests what encodes it."""
    chosen = hash_algorithm(algorithm)
    if chosen.is_cbor:
        check_encoder_once()
        native.hasher()
    return chosen


def hash_blocks(
    token_ids: Sequence[int] | NDArray[Any],
    block_size: int,
    *,
    algorithm: str = DEFAULT_ALGORITHM,
    root: bytes | None = None,
    known: Sequence[bytes] = (),
    lora: LoraAdapter | None = None,
    mm_items: Sequence[MultiModalItem] = (),
    cache_salt: str | None = None,
    prompt_embeds: NDArray[Any] | None = None,
) -> list[bytes]:
    """Names of the full blocks of `token_ids` that follow the `known` ones.

    `token_ids` are all tokens of the request from position 0: Python ints, or one 1-D array of an
    integer dtype; a list with bools or numpy ints in it is rejected, since they encode differently.
    `known` are the names of the leading blocks, so a chain grows by
    `chain += hash_blocks(tokens, size, known=chain)`. `root` None means `none_hash(algorithm)`.
    Digests equal vLLM 0.32's.

    Any text is a salt here, as for vLLM's engine; a front end refuses some (`check_cache_salt`).

    Raises ConfigError for an unknown algorithm or, at the first call, an encoder that fails its
    self-test; MisuseError for anything else that is wrong. No error shows the salt.
    O(new tokens). For a long prompt with the default algorithm about 0.3 us per block of 16 where
    the compiled hasher is there, else 1.8 us from a list and 1.3 us from an array.
    """
    chosen = _checked(algorithm)
    if type(block_size) is not int or block_size < 1:
        raise MisuseError("a block holds a whole number of tokens, at least 1", size=block_size)
    first, end = len(known), len(token_ids) // block_size
    if first > end:
        raise MisuseError("more blocks are known than the tokens fill", known=first, full=end)
    if first == end:
        return []
    parent = known[-1] if first else (root or none_hash(algorithm))
    _check_width(parent, (chosen.width,))
    extra_keys: list[ExtraKeys | None] | None = None
    if lora is not None or mm_items or cache_salt or prompt_embeds is not None:
        extra_keys = block_extra_keys(
            first,
            end,
            block_size,
            lora=lora,
            mm_items=mm_items,
            cache_salt=cache_salt,
            prompt_embeds=prompt_embeds,
        )
    if isinstance(token_ids, np.ndarray):
        _check_array(token_ids)
    if chosen.is_cbor and chosen.new is hashlib.sha256 and (compiled := native.hasher()):
        names = _hash_compiled(compiled, parent, token_ids, block_size, first, end, extra_keys)
        if names is not None:
            return names
    new_ids = token_ids[first * block_size : end * block_size]
    return _hash_pure(chosen, parent, new_ids, block_size, extra_keys)


def _hash_pure(
    chosen: HashAlgorithm,
    parent: bytes,
    new_ids: Sequence[int] | NDArray[Any],
    block_size: int,
    extra_keys: Sequence[ExtraKeys | None] | None,
) -> list[bytes]:
    """The chain by numpy and hashlib, or block by block where that cannot be."""
    extras = iter(repeat(None) if extra_keys is None else extra_keys)
    chain: list[bytes] = []
    step = _RUN_BLOCKS * block_size
    for start in range(0, len(new_ids), step):
        run = new_ids[start : start + step]
        words = None
        if chosen.is_cbor and len(run) >= _FAST_PATH_BLOCKS * block_size:
            words = cbor.as_words(run)
        if words is None:
            chain += _hash_one_by_one(chosen, parent, check_token_ids(run), block_size, extras)
        else:
            chain += _hash_words(chosen, parent, words, block_size, extras)
        parent = chain[-1]
    return chain


def _hash_compiled(
    compiled: native.Hasher,
    parent: bytes,
    token_ids: Sequence[int] | NDArray[Any],
    block_size: int,
    first: int,
    end: int,
    extra_keys: Sequence[ExtraKeys | None] | None,
) -> list[bytes] | None:
    """The chain by the compiled hasher; None leaves these tokens to the other paths."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids[first * block_size : end * block_size]
        first, end = 0, end - first
        if token_ids.dtype.kind == "u" and token_ids.size and int(token_ids.max()) >= 1 << 63:
            return None
        token_ids = np.ascontiguousarray(token_ids, np.int64)
    elif type(token_ids) is not list and type(token_ids) is not tuple:
        return None
    suffixes = cbor.NONE if extra_keys is None else list(_encoded(extra_keys))
    return compiled.hash_blocks(token_ids, block_size, first, end, parent, suffixes)


def _encoded(extra_keys: Iterable[ExtraKeys | None]) -> Iterator[bytes]:
    """What ends the encoding of each block."""
    last: ExtraKeys | None = None
    suffix = cbor.NONE
    for extra in extra_keys:
        if extra is not last and extra != last:  # an adapter's are all the same
            suffix = cbor.encode(extra)
            last = extra
        yield suffix


def _hash_words(
    algorithm: HashAlgorithm,
    parent: bytes,
    words: NDArray[np.uint32],
    block_size: int,
    extras: Iterator[ExtraKeys | None],
) -> list[bytes]:
    """The chain over pre-encoded tokens: what is left per block is one join and one digest."""
    encoded, ends = cbor.encode_runs(words, block_size)
    before_parent = cbor.head(cbor.TUPLE, 3) + cbor.head(cbor.BYTES, algorithm.width)
    before_tokens = cbor.head(cbor.TUPLE, block_size)
    new = algorithm.new
    chain = []
    start = 0
    for end, suffix in zip(ends, _encoded(extras), strict=False):  # `extras` goes on
        parent = new(before_parent + parent + before_tokens + encoded[start:end] + suffix).digest()
        chain.append(parent)
        start = end
    return chain


def _hash_one_by_one(
    algorithm: HashAlgorithm,
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    extras: Iterator[ExtraKeys | None],
) -> list[bytes]:
    chain = []
    starts = range(0, len(token_ids), block_size)
    for start, extra in zip(starts, extras, strict=False):  # `extras` goes on
        tokens = tuple(token_ids[start : start + block_size])
        parent = algorithm.new(algorithm.serialise((parent, tokens, extra))).digest()
        chain.append(parent)
    return chain


def check_token_ids(token_ids: Sequence[int] | NDArray[Any]) -> Sequence[int]:
    """The ids as Python ints. Raises MisuseError that names the types that are not int. O(n)."""
    if isinstance(token_ids, np.ndarray):
        _check_array(token_ids)
        converted: list[int] = token_ids.tolist()
        return converted
    wrong = set(map(type, token_ids)) - {int}
    if wrong:
        raise MisuseError(
            "token ids are Python ints",
            next_step="Convert them, or pass one numpy array of an integer dtype",
            types=sorted(kind.__name__ for kind in wrong),
        )
    return token_ids


def _check_array(token_ids: NDArray[Any]) -> None:
    if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
        raise MisuseError(
            "an array of token ids has one dimension and an integer dtype",
            dtype=token_ids.dtype,
            shape=token_ids.shape,
        )


def event_hash(block_hash: bytes) -> int:
    """The unsigned 64-bit form that KV events carry: the last 8 bytes, big-endian (as vLLM 0.32).

    Takes the hash alone. A packed key would yield the group number in the low half.
    """
    _check_width(block_hash, HASH_BYTES)
    return int.from_bytes(block_hash[-8:], "big")


def pack_key(block_hash: bytes, group: int) -> bytes:
    """The key of a block: its hash, then the KV group as 4 big-endian bytes (as vLLM 0.32).

    Raises MisuseError for a hash that is not 16 or 32 bytes, an int above all, or a group that
    does not fit. Nothing is ever padded or cut.
    """
    _check_width(block_hash, HASH_BYTES)
    if type(group) is not int or not 0 <= group < 1 << 8 * GROUP_BYTES:
        raise MisuseError("a KV group is an int of 0 .. 2**32 - 1", group=group)
    return block_hash + group.to_bytes(GROUP_BYTES, "big")


def unpack_key(key: bytes) -> tuple[bytes, int]:
    """The block hash and the KV group of a packed key. Raises MisuseError for any other width."""
    _check_width(key, tuple(width + GROUP_BYTES for width in HASH_BYTES))
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


def _check_width(value: bytes, widths: tuple[int, ...]) -> None:
    if type(value) is not bytes or len(value) not in widths:
        raise MisuseError(
            f"expected {' or '.join(map(str, widths))} bytes",
            type=type(value).__name__,
            length=len(value) if isinstance(value, bytes | bytearray | memoryview | str) else "-",
        )
