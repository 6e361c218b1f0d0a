"""Records that a command wants kept in memory: chosen by key or a whole namespace's.

Works in small pieces, as everything that commands ask for. All or nothing: what would go beyond the
bound of pins is refused with the figures, and nothing is kept by that request.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ebbtide.errors import EbbtideError, NoSpaceError
from ebbtide.tiers.memory import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ebbtide.tiers.memory import MemoryRecord
    from ebbtide.tiers.namespace import Namespace
    from ebbtide.tiers.store import Store

    Reply = Callable[[dict[str, Any] | EbbtideError], None]

PIECE = 256  # records: half a millisecond


class Keeps:
    """The store's part for pins of commands. Control thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def keep(self, digest: bytes, keys: Sequence[bytes], reply: Reply) -> None:
        """Keep what memory holds whole of the keys, without keys of the namespace, until `let_go`,
        a reset or the end of the store. Idempotent.

        Replies how many are kept by this call, were already, and are not in memory. Raises
        MisuseError for a namespace that is unknown, NoSpaceError at once where it is plain.
        """
        store = self._store
        namespace = store.find_namespace(digest)
        records = self._chosen(namespace, keys)
        if not keys:
            # A record takes at least its payload: a namespace that cannot fit is not begun with.
            kept_bytes = sum(record.stride for record in store.pins.kept_of(namespace.epoch))
            wanted_bytes = store.memory.payload_of[namespace.epoch]
            if wanted_bytes > store.pins.free_bytes + kept_bytes:
                raise self._refusal(wanted_bytes)
        absent = len(set(keys)) - len(records) if keys else 0
        self._keep_some(namespace, records, 0, [], {"not_in_memory": absent}, reply)

    def let_go(self, digest: bytes, keys: Sequence[bytes], reply: Reply) -> None:
        """Undo `keep` for the keys, without keys for the namespace. Replies how many were kept."""
        namespace = self._store.find_namespace(digest)
        if keys:
            records = self._chosen(namespace, keys)
        else:
            records = self._store.pins.kept_of(namespace.epoch)
        self._let_go_some(records, 0, lambda count: reply({"unpinned": count, **self._share()}))

    def _chosen(self, namespace: Namespace, keys: Sequence[bytes]) -> list[MemoryRecord]:
        index = self._store.memory.index(namespace.epoch)
        found = [index.get(key) for key in dict.fromkeys(keys)] if keys else [*index.values()]
        return [record for record in found if record is not None and record.state is State.WHOLE]

    def _keep_some(
        self,
        namespace: Namespace,
        records: list[MemoryRecord],
        start: int,
        done: list[MemoryRecord],
        report: dict[str, int],
        reply: Reply,
    ) -> None:
        store = self._store
        for record in records[start : start + PIECE]:
            if record.epoch != namespace.epoch:
                break  # a reset came between
            if store.memory.find(record.epoch, record.key) is not record:
                continue  # gone since
            kept = store.pins.keep(record)
            if kept:
                done.append(record)
            elif kept is None:
                wanted_bytes = sum(one.stride for one in records)
                self._let_go_some(done, 0, partial(self._refuse, wanted_bytes, reply))
                return
        start += PIECE
        if start < len(records):
            rest = partial(self._keep_some, namespace, records, start, done, report, reply)
            store.runtime.call_later(0.0, rest)
            return
        reply({"pinned": len(done), **report, **self._share()})

    def _let_go_some(
        self, records: list[MemoryRecord], count: int, done: Callable[[int], None]
    ) -> None:
        count += sum(self._store.pins.let_go(record) for record in records[:PIECE])
        if len(records) > PIECE:
            rest = partial(self._let_go_some, records[PIECE:], count, done)
            self._store.runtime.call_later(0.0, rest)
            return
        self._store.loads.slots_freed()
        done(count)

    def _share(self) -> dict[str, int]:
        return {
            "kept_bytes": self._store.pins.kept_bytes,
            "kept_max_bytes": self._store.bounds.pinned_max_bytes,
        }

    def _refuse(self, wanted_bytes: int, reply: Reply, count: int) -> None:
        """All that this request had pinned, so many, is let go."""
        reply(self._refusal(wanted_bytes))

    def _refusal(self, wanted_bytes: int) -> NoSpaceError:
        return NoSpaceError(
            "More would be pinned than the share of memory that pins may take",
            next_step="Unpin other records, choose fewer keys, or raise [memory] capacity.",
            wanted_bytes=wanted_bytes,
            **self._share(),
        )
