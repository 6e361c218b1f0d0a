"""Whoever follows the pool and the tables.

Called after the pool has changed; must not raise and must not call the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.group_spec import GroupSpec
    from ebbtide.allocator.request import Request


class KeyEvents(Protocol):
    """Which keys can be found no more."""

    def removed(self, key: bytes) -> None:
        """A block does not serve the key any more; a duplicate may."""
        ...

    def cleared(self) -> None:
        """No key can be found any more."""
        ...


class CacheEvents(KeyEvents, Protocol):
    """What becomes findable, and what not any more."""

    def stored(
        self,
        request: Request,
        group: int,
        spec: GroupSpec,
        start: int,
        end: int,
        kept: Sequence[int],
    ) -> None:
        """Blocks [start, end) of a request became full; `kept` are the numbers of those cached."""
        ...

    def stored_partial(
        self, request: Request, group: int, spec: GroupSpec, end_tokens: int
    ) -> None:
        """The hash boundary at `end_tokens`, inside a block, can be found."""
        ...

    def reused(self, request: Request, group: int, spec: GroupSpec, end: int) -> None:
        """A lookup found blocks [0, end) of a request that wants to be told of all its blocks."""
        ...


class Residency(Protocol):
    """How long blocks live."""

    def allocated(self, block_id: int) -> None: ...

    def accessed(self, block_id: int) -> None: ...

    def evicted(self, block_id: int) -> None: ...

    def cleared(self) -> None: ...
