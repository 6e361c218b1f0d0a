"""The account of every request: each block of its prompt once, by tier or by reason.

A request is accounted for in two moments: when it is admitted, all but what is being loaded; when
its load ends, the rest. Only then it is in the totals, so that they add up at any time. What comes
after a preemption is not counted again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.connectors.offload.asked import LOADABLE
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    from ebbtide.connectors.offload.asked import Asked
    from ebbtide.connectors.offload.load import Load
    from ebbtide.connectors.offload.namespace_link import NamespaceLink
    from ebbtide.connectors.offload.tally import Tally


class Accounts:
    """Scheduler thread only. O(1) per call, but for a load: O(its blocks)."""

    def __init__(self, tally: Tally, link: NamespaceLink) -> None:
        self._tally = tally
        self._link = link

    def admitted(self, asked: Asked, start: int, end: int) -> None:
        """The device had the first `start` tokens, and a load brings those up to `end`."""
        unit, mine, offer = asked.groups.alignment, asked.tally, asked.offer
        loadable = asked.loadable_tokens(start) // unit
        first_missed = end // unit
        mine.served("device", start // unit)
        if offer is not None and offer.end < offer.hit_end and end == offer.end:
            turned_down = (offer.hit_end - offer.end) // unit
            mine.missed(label(Miss.SLOWER_THAN_COMPUTE), turned_down)
            first_missed += turned_down
        if first_missed < loadable:
            mine.missed(self._reason(asked, first_missed * unit))
            mine.missed(label(Miss.BEHIND_MISS), loadable - first_missed - 1)
        if mine.blocks > max(loadable, start // unit):
            whole = mine.prompt_tokens % unit == 0
            mine.missed(label(Miss.LAST_TOKEN if whole else Miss.PARTIAL_BLOCK))

    def load_ended(self, load: Load, asked: Asked | None) -> None:
        """On every rank. `asked`: None when the request has gone meanwhile, and counts nowhere."""
        loaded, reason = load.outcome()
        self._tally.loads["loaded" if not reason else "partly" if loaded else "failed"] += 1
        if asked is None:
            return
        lost = load.num_units - len(loaded)
        asked.load_failed = asked.load_failed or lost > 0
        if asked.complete:
            return
        for source in loaded:
            asked.tally.served(source, 1)
        if lost:
            asked.tally.missed(reason)
            asked.tally.missed(label(Miss.BEHIND_MISS), lost - 1)
        self.complete(asked)

    def complete(self, asked: Asked) -> None:
        """All blocks of the request are accounted for."""
        asked.complete = True
        self._tally.add(asked.tally)

    def _reason(self, asked: Asked, end: int) -> str:
        if asked.states is None:
            if self._link.opening or self._link.pending:
                return label(Miss.NAMESPACE_PENDING)
            no_store = asked.lost or self._link.handle is None
            return label(Miss.UNKNOWN if no_store else Miss.TIMEOUT)
        code = asked.stop_code(end)
        if code == Place.PENDING:
            return label(Miss.TIMEOUT)
        # A place: the engine took fewer than it was offered, or a window further back is missing.
        return label(Miss.UNKNOWN) if code in LOADABLE else label(code)
