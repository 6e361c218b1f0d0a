"""What commands ask of a running store: a room of its own, because engines never do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.tiers.check import Checks
from ebbtide.tiers.keep import Keeps
from ebbtide.tiers.purge import Purges
from ebbtide.tiers.survey import Surveys

if TYPE_CHECKING:
    from ebbtide.tiers.store import Store


class Care:
    """Every part answers in small pieces, so that no engine waits for a command."""

    def __init__(self, store: Store) -> None:
        self.checks = Checks(store)
        self.keeps = Keeps(store)
        self.purges = Purges(store)
        self.surveys = Surveys(store)
