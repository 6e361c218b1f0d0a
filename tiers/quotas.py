"""Which quota a namespace has: the operator's rules, matched against its descriptor."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ebbtide.tiers.shares import NO_QUOTA, Quota

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.tiers.shares import Shares

    Pairs = Sequence[Sequence[object]]

_log = logging.getLogger("ebbtide.tiers")

DUST = 1e-9  # sums of decimal shares are not exact


class Rule(NamedTuple):
    """A quota for each namespace with a field that contains `match`, written `name=value`."""

    match: str
    quota: Quota


class Quotas:
    """The rules, and the floors that were given out. Control thread only; O(rules) a call.

    Caps hold for every namespace. A floor is given to a namespace when the first engine opens it,
    for the life of the store's process: what no engine asks for keeps no room from others. Floors
    are given as long as they add up to the whole; a later namespace gets what is left.
    """

    def __init__(self, default: Quota = NO_QUOTA, rules: Sequence[Rule] = ()) -> None:
        self._default = default
        self._rules = tuple(rules)
        self._given: dict[bytes, Quota] = {}  # by namespace digest

    def wanted(self, descriptor: Pairs) -> Quota:
        """What the first rule that matches says, or the default."""
        fields = [f"{n}={v}" for n, v in descriptor if isinstance(v, str | int)]
        for rule in self._rules:
            if any(rule.match in field for field in fields):
                return rule.quota
        return self._default

    def give(self, digest: bytes, descriptor: Pairs) -> None:
        """An engine uses the namespace: it has its floor from now on. Idempotent."""
        if digest in self._given:
            return
        wanted = self.wanted(descriptor)
        left = 1.0 - sum(quota.floor for quota in self._given.values())
        floor = wanted.floor if wanted.floor <= left + DUST else max(0.0, left)
        if floor < wanted.floor:
            _log.warning(
                "namespace %s gets a floor of %.3g instead of %.3g: the others have the rest",
                digest.hex()[:12],
                floor,
                wanted.floor,
            )
        self._given[digest] = Quota(floor, wanted.cap)

    def of(self, digest: bytes, descriptor: Pairs) -> Quota:
        """What applies to the namespace now."""
        return self._given.get(digest) or Quota(0.0, self.wanted(descriptor).cap)

    def assign(self, shares: Shares, epoch: int, digest: bytes, descriptor: Pairs) -> None:
        """Tell the account of a medium what applies to the namespace that has this epoch."""
        ordered = self.wanted(descriptor).limits
        shares.assign(epoch, self.of(digest, descriptor), ordered=ordered)
