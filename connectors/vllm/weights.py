"""What a model's weights are called in the cache namespace: by content, never by name or path.

New weights under an old name must miss, and the same bytes elsewhere must hit. Whoever cannot
know the content says so (`WeightsIdentity.failed`), and the caller then persists nothing.
Knows neither torch nor vLLM.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.connectors.vllm.digest_cache import DigestCache, default_cache_path, stamp_of
from ebbtide.errors import ConfigError, EbbtideError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from io import FileIO

__all__ = [
    "DigestCache",
    "WeightsError",
    "WeightsIdentity",
    "default_cache_path",
    "hub_cache_dir",
    "resolve_local",
    "weights_digest",
    "weights_files",
]

_log = logging.getLogger("ebbtide.connectors")

CHUNK_BYTES = 4 << 20  # between two looks at `cancelled`
TREE_ENTRIES_MAX = 100_000  # more is no model directory
HASH_TRIES_MAX = 3
# A change within the tick of a file system's clock leaves its times as they were, and some tick
# only every two seconds: what is younger than that is not remembered.
SETTLED_NS = 2_000_000_000
CLOSE_PATIENCE_S = 1.0
REVISION_CHARS_MAX = 200

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TRAINING_ONLY = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
# Sampling defaults change no KV, and token ids are in every key.
_NO_NUMERICS = {"generation_config.json", "tokenizer_config.json"}
_SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_NAME_THEM = "To persist anyway, name the weights yourself with weights_revision."


class WeightsError(EbbtideError):
    """The content of the weights cannot be known. Costs persistence, never the engine."""


def weights_files(directory: Path) -> list[Path]:
    """The files that decide a model's answers, sorted: weights, indexes, configs and model code.

    Subdirectories count (some models keep an encoder there), links are followed, names with a
    leading dot are left out. A file instead of a directory stands for itself and, if it is one
    part of a split GGUF, for all parts. Left out as well: training state, tokenizers, sampling
    defaults and adapters, which keys name by themselves. Reads directories, no file; may block on
    a slow disk. Raises WeightsError.
    """
    try:
        if directory.is_dir():
            return sorted(path for path in _tree(directory) if _decides(path.name))
        split = _SPLIT_GGUF.fullmatch(directory.name)
        if split is None:
            return [directory]
        name, count = split.groups()
        return [
            directory.with_name(f"{name}-{part:05}-of-{count}.gguf")
            for part in range(1, int(count) + 1)
        ]
    except OSError as error:
        raise _unreadable(error, directory) from error


def _tree(directory: Path) -> list[Path]:
    found: list[Path] = []
    entries_seen = 0
    pending: list[tuple[Path, frozenset[tuple[int, int]]]] = [(directory, frozenset())]
    while pending:
        place, above = pending.pop()
        status = os.stat(place)
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            continue  # a link back up
        with os.scandir(place) as entries:
            for entry in entries:
                entries_seen += 1
                if entries_seen > TREE_ENTRIES_MAX:
                    raise WeightsError(
                        "The model's directory holds too many files",
                        next_step="Point the engine at the directory of one model.",
                        path=directory,
                        entries_max=TREE_ENTRIES_MAX,
                    )
                if entry.name.startswith(".") or entry.name == "lost+found":
                    continue
                if entry.is_dir():
                    pending.append((place / entry.name, above | {identity}))
                else:  # a link to nothing counts too: it is a file that cannot be read
                    found.append(place / entry.name)
    return found


def _is_weights(name: str) -> bool:
    return name.lower().endswith(_WEIGHTS) and name not in _TRAINING_ONLY and not _is_adapter(name)


def _is_adapter(name: str) -> bool:
    return name.startswith(("adapter_model.", "adapter_config."))


def _decides(name: str) -> bool:
    if name in _NO_NUMERICS or _is_adapter(name):
        return False
    # Configs by ending: every quantiser and processor has a name of its own for its file.
    return _is_weights(name) or name.endswith(("config.json", "params.json", ".index.json", ".py"))


def weights_digest(
    files: Sequence[Path], cache: DigestCache, cancelled: Callable[[], bool]
) -> str | None:
    """SHA-256 (hex) over name, size and content of each file; None when cancelled.

    Names are relative to the directory that all files share. Reads every byte that `cache` does
    not know, `CHUNK_BYTES` between two calls of `cancelled`, without holding the interpreter lock.
    Raises WeightsError when a file cannot be read, does not hold still, or none holds weights.
    """
    if not any(_is_weights(path.name) for path in files):
        raise WeightsError("The model's directory holds no weight files", next_step=_NAME_THEM)
    shared = os.path.commonpath([path.absolute().parent for path in files])
    whole = hashlib.sha256(b"ebbtide weights 1\n")
    for name, path in sorted((os.fsencode(os.path.relpath(path, shared)), path) for path in files):
        try:
            found = _file_digest(path, cache, cancelled)
        except OSError as error:
            raise _unreadable(error, path) from error
        if found is None:
            return None
        # The length first: no name can pass for the end of another entry.
        whole.update(b"%d %s %d %s\n" % (len(name), name, found[0], found[1].encode()))
    return whole.hexdigest()


def _file_digest(
    path: Path, cache: DigestCache, cancelled: Callable[[], bool]
) -> tuple[int, str] | None:
    """Size and SHA-256 of one file that held still meanwhile; None when cancelled."""
    for _ in range(HASH_TRIES_MAX):
        started_ns = time.time_ns()
        # Without O_NONBLOCK a pipe in the place of a file would hold the thread for ever.
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.EINVAL, "It is no regular file", str(path))
            known = cache.get(before)
            if known is not None:
                return before.st_size, known
            content = _content_digest(file, before.st_size, cancelled)
        if content is None:
            return None
        digest, read_bytes = content
        if stamp_of(before) == stamp_of(os.stat(path)) and read_bytes == before.st_size:
            if started_ns - max(before.st_mtime_ns, before.st_ctime_ns) >= SETTLED_NS:
                cache.put(before, digest)
            return before.st_size, digest
    raise WeightsError(
        "The weights change while they are read",
        next_step="Restart the engine when they are complete.",
        path=path,
        tries=HASH_TRIES_MAX,
    )


def _content_digest(
    file: FileIO, size_bytes: int, cancelled: Callable[[], bool]
) -> tuple[str, int] | None:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(CHUNK_BYTES))
    read_bytes = 0
    while read_bytes <= size_bytes:  # a file that grows is not followed
        if cancelled():
            return None
        count = file.readinto(chunk)
        if not count:
            break
        digest.update(chunk[:count])
        read_bytes += count
    return digest.hexdigest(), read_bytes


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _unreadable(error: OSError, path: Path) -> WeightsError:
    return WeightsError(
        "The model's weights cannot be read",
        next_step=_NAME_THEM,
        path=error.filename or path,
        reason=error.strerror,
    )


class WeightsIdentity:
    """The identity of one model's weights: known at once, later, or never (`failed` says why).

    Hashing runs in one daemon thread, started here. `poll` and `failed` never wait and never
    raise. `failed`: None, or the reason for which there will be no identity.
    """

    def __init__(
        self, directory: Path | None, cache: DigestCache | None = None, *, known: str | None = None
    ) -> None:
        """`directory` may be a single file; None: the weights are not on this machine."""
        self.failed: str | None = None
        self._known = known
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        if known is not None:
            return
        if directory is None:
            remote = WeightsError("The weights are not on this machine", next_step=_NAME_THEM)
            self.failed = str(remote)
            return
        cache = DigestCache(default_cache_path()) if cache is None else cache
        thread = threading.Thread(
            target=self._hash, args=(directory, cache), name="ebbtide-weights", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self.failed = f"No thread for hashing the weights ({error})"
            return
        self._thread = thread

    @classmethod
    def choose(
        cls,
        directory: Path | None,
        cache: DigestCache | None = None,
        *,
        weights_revision: str | None = None,
        dummy_seed: int | None = None,
    ) -> WeightsIdentity:
        """What the user said, else the seed of random weights, else what the files hold."""
        if weights_revision is not None:
            return cls.of_revision(weights_revision)
        if dummy_seed is not None:
            return cls.of_dummy(dummy_seed)
        return cls(directory, cache)

    @classmethod
    def of_revision(cls, text: str) -> WeightsIdentity:
        """The user vouches for weights, config and model code. ConfigError: no usable text."""
        if not text.strip() or len(text) > REVISION_CHARS_MAX or not text.isprintable():
            raise ConfigError(
                "weights_revision is no usable name",
                next_step="Give one printable line, or leave it out to have the weights hashed.",
                weights_revision=repr(text[:REVISION_CHARS_MAX]),
                chars_max=REVISION_CHARS_MAX,
            )
        return cls(None, known=f"revision/{text}")

    @classmethod
    def of_dummy(cls, seed: int) -> WeightsIdentity:
        """Random weights. The model's config is not part of it: the namespace must hold that."""
        return cls(None, known=f"dummy/{seed}")

    def poll(self) -> str | None:
        """The identity, or None as long as it is unknown (for ever, once `failed` is set)."""
        return self._known

    def close(self) -> None:
        """End the hashing; waits for one chunk at most. What is known stays known. Idempotent."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(CLOSE_PATIENCE_S)
            if self._thread.is_alive():
                _log.warning("A read of the weights hangs; its thread is left to the process' end")

    def _hash(self, directory: Path, cache: DigestCache) -> None:
        failed: str | None = "Hashing the weights ended by a fault of its own"
        try:
            digest = weights_digest(weights_files(directory), cache, self._cancelled.is_set)
            self._known = digest and f"sha256/{digest}"
            failed = None
        except WeightsError as error:
            failed = str(error)
        finally:
            self.failed = failed


def resolve_local(
    model: str, revision: str | None, cache_dir: str | Path | None = None
) -> Path | None:
    """Where a model lies on this machine: a path, or a hub id's snapshot in the hub's cache.

    `cache_dir` is the engine's download directory. None when it is not here or its place cannot
    be told for sure. Never asks the network; costs a few stats.
    """
    if os.path.isdir(model) or (os.path.isfile(model) and _is_weights(os.path.basename(model))):
        return Path(model).absolute()
    # Another hub's models lie elsewhere; a directory here of the same name would be another model.
    is_other_hub = os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")
    wanted = (revision or "main").split("/")
    if is_other_hub or {"", ".", ".."} & set(wanted):
        return None
    repository = Path(cache_dir or hub_cache_dir(), "models--" + model.replace("/", "--"))
    try:
        with open(repository.joinpath("refs", *wanted), encoding="ascii") as file:
            commit = file.read(256).strip()
    except (OSError, ValueError):
        commit = "/".join(wanted)  # a commit has no ref
    if "/" in commit or "\0" in commit or commit in ("", ".", ".."):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if os.path.isdir(snapshot) else None


def hub_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The hub library's rules: HF_HUB_CACHE, else under HF_HOME, else under the user's cache."""
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(named or os.path.join(home, "hub"))))
