"""One half's connection to the store, a private one started first."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ebbtide.connectors.client import SocketClient
from ebbtide.connectors.process import ensure_store
from ebbtide.connectors.store_keeper import StoreKeeper
from ebbtide.errors import TierUnavailableError

if TYPE_CHECKING:
    from ebbtide.connectors.vllm.settings import Settings

_log = logging.getLogger("ebbtide.connectors.vllm")


class Connection:
    """Blocking to build, at the engine's start only. `client` belongs to one half.

    Raises ConfigError when a private store refuses to start. A store that cannot be reached is
    waited for in the background: everything is a miss until it answers.
    """

    def __init__(self, settings: Settings, role: str, *, arena: bool) -> None:
        self._keeper: StoreKeeper | None = None
        if settings.private:
            self._start(settings)
        self.client = _connect(settings, role, arena=arena)

    def close(self) -> None:
        """The half has closed its client; nobody restarts the store any more. Idempotent."""
        self.client.close()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _start(self, settings: Settings) -> None:
        store_settings = settings.store_settings()
        try:
            process = ensure_store(store_settings)
        except TierUnavailableError as error:
            _log.error("No store, so every block is computed: %s", error)
            return
        if process is not None:
            self._keeper = StoreKeeper(process, store_settings)


def _connect(settings: Settings, role: str, *, arena: bool) -> SocketClient:
    uids = settings.config.server.allow_uids
    try:
        return SocketClient(settings.socket, settings.engine, role, arena=arena, allow_uids=uids)
    except TierUnavailableError as error:
        _log.warning("The store does not answer yet; until then every block is computed: %s", error)
    return SocketClient(
        settings.socket, settings.engine, role, arena=arena, required=False, allow_uids=uids
    )
