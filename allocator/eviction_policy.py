"""Which unreferenced block of the device pool is handed out next: an interface, chosen by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ebbtide.allocator.block import FreeBlockQueue
from ebbtide.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ebbtide.allocator.block import Block


class EvictionPolicy(Protocol):
    """The unreferenced blocks of a pool, in the order in which they are handed out.

    The pool calls `release` when blocks lose their last reference, `remove` when a lookup takes one
    back, `pop` when it needs blocks. Owed: every block that was released and neither removed nor
    popped comes out exactly once; `pop` of more blocks than there are raises MisuseError and takes
    none; `__iter__` and `peek` show the present order and change nothing. O(1) per block.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]: ...

    def pop(self, count: int) -> list[Block]:
        """Take the next `count` blocks."""
        ...

    def peek(self, count: int) -> list[Block]:
        """Up to `count` blocks that would be next."""
        ...

    def remove(self, block: Block) -> None:
        """Take one block out, wherever it stands. MisuseError if it is not there."""
        ...

    def release(self, uncached: Sequence[Block], cached: Sequence[Block]) -> None:
        """Take blocks in that nobody references any more, each list in the order of eviction."""
        ...

    def check_integrity(self) -> None:
        """Raise MisuseError when it contradicts itself. For tests."""
        ...


DEFAULT_POLICY = "lru"
_POLICIES: dict[str, Callable[[Iterable[Block]], EvictionPolicy]] = {DEFAULT_POLICY: FreeBlockQueue}


def register_eviction_policy(
    name: str, factory: Callable[[Iterable[Block]], EvictionPolicy]
) -> None:
    """Make a policy known. `factory` gets the blocks of a new pool, first to go first.

    Raises ConfigError for a name that is taken.
    """
    if name in _POLICIES:
        raise ConfigError("an eviction policy of that name exists", name=name)
    _POLICIES[name] = factory


def eviction_policy(name: str, blocks: Iterable[Block]) -> EvictionPolicy:
    """A policy over the blocks of a new pool. Raises ConfigError that lists the choices."""
    if name not in _POLICIES:
        raise unknown_name("eviction policy", name, sorted(_POLICIES))
    return _POLICIES[name](blocks)
