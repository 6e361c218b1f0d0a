"""The committer: gathers index changes into batches, makes each durable in the one safe order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ebbtide.errors import TierUnavailableError
from ebbtide.tiers.index import IndexBatch
from ebbtide.tiers.runtime import COMMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ebbtide.tiers.index import Sequences, StoredNamespace
    from ebbtide.tiers.index_page import Rows
    from ebbtide.tiers.record_table import Columns
    from ebbtide.tiers.runtime import Runtime, Timer
    from ebbtide.tiers.segments import Ints
    from ebbtide.tiers.slab import Slab


class Index(Protocol):
    """What the committer needs of the durable index."""

    def commit(self, batch: IndexBatch) -> None: ...
    def save_recency(self, sequences: Sequences) -> None: ...
    def mark_clean(self, clean: bool) -> None: ...
    def close(self) -> None: ...


class _Batch:
    __slots__ = ("bytes", "freed", "index", "waiters")

    def __init__(self) -> None:
        self.index = IndexBatch()
        self.bytes = 0  # of payload that the additions name
        self.freed: list[int] = []  # rows whose slots to hand out again after this commit
        self.waiters: list[Callable[[bool], None]] = []

    def __bool__(self) -> bool:
        return bool(self.index or self.freed or self.waiters)


class Committer:
    """One commit at a time; while it runs the next batch gathers. Control thread only.

    A batch is committed when it holds `batch_bytes` of payload, `interval_s` after its first
    change, or when somebody is in a hurry. After a failure the batch's additions are lost, later
    batches fail at once and nothing is retried: the page cache no longer tells what the drive
    holds.
    """

    def __init__(
        self,
        runtime: Runtime,
        slab: Slab,
        index: Index,
        *,
        batch_bytes: int,
        interval_s: float,
        on_committed: Callable[[list[int]], None],
        on_failed: Callable[[BaseException, Columns], None],
    ) -> None:
        self._runtime = runtime
        self._slab = slab
        self._index = index
        self._batch_bytes = batch_bytes
        self._interval_s = interval_s
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._batch = _Batch()
        self._running: _Batch | None = None
        self._timer: Timer | None = None
        self._hurried = False
        self._broken: str | None = None  # why; the exception itself would keep its frames alive
        self.running_since: float | None = None
        self.commits = 0

    @property
    def idle(self) -> bool:
        """Nothing is gathered and no commit is under way."""
        return not self._batch and self._running is None

    def add(self, rows: Rows, slot_bytes: int) -> None:
        """The payload of these records has been written (not yet synced)."""
        self._batch.index.add(rows)
        self._batch.bytes += slot_bytes
        self._arm()

    def remove(self, offsets: Ints, lengths: Ints) -> None:
        """The records of these lengths, in these slots, are no more."""
        self._batch.index.remove(offsets, lengths)
        self._arm()

    def free_after(self, rows: Iterable[int]) -> None:
        """Hand the slots back once the removal of their entries is durable.

        The entries' removal is in the gathering batch or in an earlier one: either way it is
        durable when the gathering batch is.
        """
        self._batch.freed += rows
        self._arm()

    def put_namespace(self, namespace: StoredNamespace) -> None:
        self._batch.index.put_namespace(namespace)
        self._arm()

    def break_off(self, reason: str) -> None:
        """Commit nothing any more: whatever is gathered from now on fails at its time."""
        self._broken = self._broken or reason

    def hurry(self) -> None:
        """Somebody waits for slots: commit as soon as the commit under way has ended."""
        if self._batch:
            self._hurried = True
            self._maybe_start()

    def flush(self, done: Callable[[bool], None]) -> None:
        """`done(ok)` when every change made before this call is durable, or lost for good."""
        self._batch.waiters.append(done)
        self._hurried = True
        self._maybe_start()

    def save_recency(
        self, sequences: Callable[[], Sequences], done: Callable[[bool], None]
    ) -> None:
        """Compute and write the order of eviction in the committer's thread."""
        if self._broken is not None:
            done(False)
            return
        self._runtime.start(
            COMMIT,
            lambda coldest_first: self._index.save_recency(coldest_first()),
            [sequences],
            lambda outcomes: done(outcomes[0] is None),
        )

    def close(self, clean: bool) -> None:
        """Leave the clean mark if everything is committed, and close the index."""
        if clean and self._broken is None and self.idle:
            self._index.mark_clean(True)
        if self._timer is not None:
            self._timer.cancel()
        self._index.close()

    def _arm(self) -> None:
        if self._batch.bytes >= self._batch_bytes:
            self._hurried = True
            self._maybe_start()
        elif self._timer is None:
            self._timer = self._runtime.call_later(self._interval_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._hurried = True
        self._maybe_start()

    def _maybe_start(self) -> None:
        if self._running is not None or not self._hurried or not self._batch:
            return
        batch, self._batch = self._batch, _Batch()
        self._running, self._hurried = batch, False
        self.running_since = self._runtime.now()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._runtime.start(COMMIT, self._commit, [batch], self._finished)

    def _commit(self, batch: _Batch) -> None:
        """In the committer's thread."""
        if self._broken is not None:
            raise TierUnavailableError("An earlier commit failed", reason=self._broken)
        if batch.bytes:
            self._slab.sync()  # the payload first
        if batch.index:
            self._index.commit(batch.index)  # then all of the index changes, or none

    def _finished(self, outcomes: list[BaseException | None]) -> None:
        batch, error = self._running, outcomes[0]
        assert batch is not None
        self._running = self.running_since = None
        if error is None:
            self.commits += 1
            self._on_committed(batch.freed)  # only now may the slots be written again
        else:
            self._broken = self._broken or str(error)
            self._on_failed(error, batch.index.added())
        for waiter in batch.waiters:
            waiter(error is None)
        self._maybe_start()
