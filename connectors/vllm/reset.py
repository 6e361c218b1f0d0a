"""The reset of a namespace: the one hook of the scheduler that waits, because it was asked to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient
from ebbtide.connectors.client_interface import ask
from ebbtide.errors import EbbtideError

if TYPE_CHECKING:
    from ebbtide.connectors.vllm.settings import Settings

_log = logging.getLogger("ebbtide.connectors.vllm")

RESET_TIMEOUT_S = 30.0


def reset_store(settings: Settings, descriptor: list[list[object]]) -> bool:
    """Forget the namespace of `descriptor` in every tier. True when that is durable.

    On a connection of its own, so that nothing of the halves' is lost while it waits.
    """
    try:
        client = SocketClient(
            settings.socket,
            settings.engine,
            "reset",
            arena=False,
            allow_uids=settings.config.server.allow_uids,
        )
        try:
            opened = ask(client, wire.OpenNamespace(descriptor), RESET_TIMEOUT_S)
            assert isinstance(opened, wire.NamespaceOpened)
            ask(client, wire.Reset(opened.namespace), RESET_TIMEOUT_S)
        finally:
            client.close()
    except EbbtideError as error:
        _log.error("The tiers were not reset: %s", error)
        return False
    return True
