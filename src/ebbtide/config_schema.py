"""The one schema of the configuration: every bound of ebbtide with its unit, default and meaning.

A field that ends in `_bytes` is written as a size without that ending (`capacity = "8GiB"`), one
that ends in `_s` as a duration (`write_after = "30s"`); everything else is written as it is named.
Sizes are totals of the store, whatever the number of ranks, engines or devices that use it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from ebbtide.sizes import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SLOT_ALIGNMENT = 4096
MEMORY_CAPACITY_MIN = 4 * SLOT_ALIGNMENT
DISK_CAPACITY_MIN = 16 * MIB

# What vLLM's own flags have to say, so that it finds the connector and survives a failed load.
VLLM_CONNECTOR = "EbbtideConnector"
VLLM_MODULE_PATH = "ebbtide.connectors.vllm"
VLLM_ROLES = ("kv_both", "kv_producer", "kv_consumer")
VLLM_LOAD_FAILURE_POLICY = "recompute"
VLLM_FIRST = (0, 30)  # the minor versions that the connector works with, from this one
VLLM_BELOW = (0, 33)  # to the one before this
VLLM_HASH_FLAG = "--prefix-caching-hash-algo sha256_cbor"


def written_name(name: str) -> str:
    """Return how the field `name` is spelled in a configuration: without its unit."""
    return name.removesuffix("_bytes").removesuffix("_s")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=written_name):
    """What all sections share: frozen, keywords only, no unknown field, unit-free spelling."""


class MemoryConfig(Section, frozen=True, kw_only=True):
    """The arena: pinned host memory, shared by all ranks and engines of one store."""

    capacity_bytes: Annotated[
        int, Meta(ge=1, description="Size of the arena in system RAM, in total and not per rank.")
    ]
    load_window_bytes: Annotated[
        int, Meta(ge=1, description="Most arena bytes that one load holds at a time.")
    ]
    load_reserve_ratio: Annotated[
        float, Meta(ge=0, le=0.5, description="Share of the slots that only loads may take.")
    ] = 0.05
    verify: Annotated[
        Literal["all", "disk"],
        Meta(description="Which reads check the digest: all, or only those that come from disk."),
    ] = "all"
    populate: Annotated[
        bool, Meta(description="Touch every page of the arena at start, not at first use.")
    ] = True


class DiskConfig(Section, frozen=True, kw_only=True):
    """The NVMe tier. Absent as a whole when neither path nor capacity is given."""

    path: Annotated[
        str,
        Meta(min_length=1, description="Directory of the tier, absolute; it belongs to ebbtide."),
    ]
    capacity_bytes: Annotated[
        int, Meta(ge=1, description="Most bytes under the directory: slabs, index and journal.")
    ]
    dirty_max_bytes: Annotated[
        int,
        Meta(ge=1, description="Most bytes that a power cut may lose: in memory, not yet on disk."),
    ]
    commit_batch_bytes: Annotated[
        int, Meta(ge=1, description="Payload bytes after which a commit batch is closed.")
    ]
    commit_interval_s: Annotated[
        float, Meta(gt=0, description="Time after which a commit batch is closed, full or not.")
    ] = 0.05
    write_after_s: Annotated[
        float, Meta(ge=0, description="Age at which a record in memory is also written to disk.")
    ] = 30.0
    admission: Annotated[
        Literal["all", "second_use"],
        Meta(description="What is written: all records, or those that were used again."),
    ] = "all"
    read_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that read from the disk.")
    ] = 8
    write_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that write to the disk.")
    ] = 8
    lru_save_interval_s: Annotated[
        float, Meta(gt=0, description="Time between two saves of the eviction order.")
    ] = 60.0


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Bounds of the queues, waits and tables that belong to no single tier."""

    drain_timeout_s: Annotated[
        float, Meta(ge=0, description="Longest wait for unwritten records at a clean stop.")
    ] = 10.0
    lookup_timeout_s: Annotated[
        float, Meta(gt=0, description="Time after which an unanswered lookup is a miss.")
    ] = 0.05
    ghost_entries: Annotated[
        int, Meta(ge=0, description="Evicted keys remembered to tell evicted from never seen.")
    ] = 1_000_000
    frame_max_bytes: Annotated[
        int, Meta(ge=4096, description="Largest control message on the socket.")
    ] = 4 * MIB
    connections_max: Annotated[
        int, Meta(ge=1, le=65_536, description="Most connections at the same time.")
    ] = 256
    write_queue_bytes: Annotated[
        int, Meta(ge=1, description="Bytes that may wait for the disk; what exceeds it is shed.")
    ] = 128 * MIB
    store_window_bytes: Annotated[
        int,
        Meta(ge=1, description="Most arena bytes that one engine may write to at the same time."),
    ] = GIB


class NamespaceFairness(Section, frozen=True, kw_only=True):
    """The shares of the namespaces with a field that contains `match`."""

    match: Annotated[str, Meta(min_length=1)]
    floor: Annotated[float, Meta(ge=0, le=1)] | None = None  # None: the section's
    cap: Annotated[float, Meta(gt=0, le=1)] | None = None


class FairnessConfig(Section, frozen=True, kw_only=True):
    """How the namespaces of one store share memory and disk."""

    floor: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of each tier that no other namespace takes from one."),
    ] = 0.0
    cap: Annotated[
        float, Meta(gt=0, le=1, description="Most of each tier that one namespace may hold.")
    ] = 1.0
    namespace: Annotated[
        tuple[NamespaceFairness, ...],
        Meta(description="Other shares for the namespaces with a field that contains `match`."),
    ] = ()


UID_MAX = 2**32 - 2  # the highest number means "no user"


class ServerConfig(Section, frozen=True, kw_only=True):
    """Who may be at the other end of the socket. Both ends read it: neither trusts a stranger."""

    allow_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=UID_MAX)], ...],
        Meta(description="Users, by number, that are trusted besides one's own and root."),
    ] = ()
    socket_group: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Group, by name or number, that may open the socket; unset: nobody else."),
    ] = None


class HttpConfig(Section, frozen=True, kw_only=True):
    """Probes and numbers over HTTP. Absent as a whole when no port is given."""

    port: Annotated[int, Meta(ge=0, le=65_535, description="TCP port; 0: one that is free.")]
    host: Annotated[
        str, Meta(min_length=1, description="Address to listen on; not loopback: needs a token.")
    ] = "127.0.0.1"
    token_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="File with the token that /metrics and /stats want; unset: none."),
    ] = None


Layerwise = Literal["auto", "on", "off"]


class ConnectorConfig(Section, frozen=True, kw_only=True):
    """What the halves in an engine do. The store reads none of it."""

    stores: Annotated[
        Literal["eager", "lazy"],
        Meta(description="Eager: each block as it fills. Lazy: what the device soon reuses."),
    ] = "eager"
    prompt_only: Annotated[
        bool, Meta(description="Store only blocks of the prompt, never generated ones.")
    ] = False
    copy: Annotated[
        Literal["auto", "engine", "kernel", "torch"],
        Meta(description="What copies blocks of a GPU; auto: what a measurement at start says."),
    ] = "auto"
    layerwise: Annotated[
        Layerwise,
        Meta(
            description="Run on a load whose later layers are still to arrive; auto: where copies "
            "run beside the forward pass, and it waits layer by layer."
        ),
    ] = "auto"
    always_load: Annotated[
        bool, Meta(description="Load every hit, also one that seems slower than computing it.")
    ] = False
    compute_margin_ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Load when it should take at most this share of the time to compute.",
        ),
    ] = 0.9
    store_budget_bytes: Annotated[
        int, Meta(ge=1, description="Most bytes that one engine step hands over to be stored.")
    ] = 64 * MIB
    load_timeout_s: Annotated[
        float, Meta(gt=0, description="Time after which what has not begun to load is computed.")
    ] = 10.0
    store_timeout_s: Annotated[
        float, Meta(gt=0, description="Time after which a store that got no answer is given up.")
    ] = 5.0
    weights_revision: Annotated[
        # An empty name would make all weights equal.
        Annotated[str, Meta(min_length=1, max_length=200)] | None,
        Meta(
            description="Your own name of the weights' content, kept after a reset; "
            "unset: their files are hashed."
        ),
    ] = None


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration, resolved: sizes in bytes, durations in seconds."""

    memory: MemoryConfig
    socket: Annotated[
        str | None,
        Meta(description="Unix socket of a shared store, absolute; unset: a private store."),
    ] = None
    disk: DiskConfig | None = None
    limits: LimitsConfig = LimitsConfig()
    server: ServerConfig = ServerConfig()
    http: HttpConfig | None = None
    fairness: FairnessConfig = FairnessConfig()
    connector: ConnectorConfig = ConnectorConfig()


class Kind(Enum):
    """How a value is written."""

    PLAIN = "as it is"
    SIZE = "a size"
    DURATION = "a duration"
    LIST = "a list"
    TABLES = "a list of tables"


class Field(NamedTuple):
    """One value of the configuration, addressed as it is written."""

    path: str  # as in "memory.capacity"
    attribute: str  # as in "capacity_bytes"
    kind: Kind
    type: Any  # what msgspec converts to, bounds included
    choices: tuple[str, ...]  # where it is one of a few words
    default: object  # msgspec.NODEFAULT when it is derived or must be given
    doc: str


SECTIONS: Mapping[str, type[Section]] = {
    "memory": MemoryConfig,
    "disk": DiskConfig,
    "limits": LimitsConfig,
    "server": ServerConfig,
    "http": HttpConfig,
    "fairness": FairnessConfig,
    "connector": ConnectorConfig,
}


OPTIONAL_SECTIONS = ("disk", "http")  # there when a value of theirs is given


class Derived(NamedTuple):
    """A default that follows from other values. `compute` reads them by path."""

    formula: str
    compute: Callable[[Mapping[str, Any]], int]


# Each quarter, half and share is at least one byte, so that the bounds above still hold.
DERIVED: Mapping[str, Derived] = {
    "memory.load_window": Derived(
        "min(memory.capacity / 4, 256MiB)",
        lambda values: max(1, min(values["memory.capacity"] // 4, 256 * MIB)),
    ),
    "disk.dirty_max": Derived(
        "min(memory.capacity / 2, 1GiB)",
        lambda values: max(1, min(values["memory.capacity"] // 2, GIB)),
    ),
    "disk.commit_batch": Derived(
        "min(disk.capacity / 32, 64MiB)",
        lambda values: max(1, min(values["disk.capacity"] // 32, 64 * MIB)),
    ),
}


def _bare(kind_of: object) -> object:
    return get_args(kind_of)[0] if get_origin(kind_of) is Annotated else kind_of


def _kind(attribute: str, default: object, kind_of: object) -> Kind:
    if isinstance(default, tuple):
        item = get_args(_bare(kind_of))[0]
        is_table = isinstance(item, type) and issubclass(item, Section)
        return Kind.TABLES if is_table else Kind.LIST
    if attribute.endswith("_bytes"):
        return Kind.SIZE
    return Kind.DURATION if attribute.endswith("_s") else Kind.PLAIN


def _choices(kind_of: object) -> tuple[str, ...]:
    bare = _bare(kind_of)
    return get_args(bare) if get_origin(bare) is Literal else ()


def _fields_of(struct: type[Section], prefix: str) -> list[Field]:
    found = []
    for info in msgspec.structs.fields(struct):
        if info.name in SECTIONS:
            continue
        documented = [part for part in get_args(info.type) if isinstance(part, Meta)]
        found.append(
            Field(
                path=prefix + info.encode_name,
                attribute=info.name,
                kind=_kind(info.name, info.default, info.type),
                type=info.type,
                choices=_choices(info.type),
                default=info.default,
                doc=documented[0].description or "" if documented else "",
            )
        )
    return found


FIELDS: Mapping[str, Field] = {
    field.path: field
    for field in (
        *_fields_of(Config, ""),
        *(field for name, struct in SECTIONS.items() for field in _fields_of(struct, f"{name}.")),
    )
}
