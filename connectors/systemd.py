"""Telling systemd how a service stands, as sd_notify(3) does: one datagram to NOTIFY_SOCKET."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_log = logging.getLogger("ebbtide.serve")

VARIABLE = "NOTIFY_SOCKET"


class Notifier:
    """The service manager that started this process; whoever was started otherwise tells nobody.

    Never waits and never fails: a manager that does not listen costs a line in the log.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Takes the address out of `environ`: a child of the service must not speak for it."""
        self._address = environ.pop(VARIABLE, "")

    def tell(self, *states: str) -> None:
        """Send assignments like `READY=1`, all in one datagram."""
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):  # in the abstract namespace, which has no files
            address = "\0" + address[1:]
        text = "\n".join(state.replace("\n", " ") for state in states)
        flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with socket.socket(socket.AF_UNIX, flags) as sender:
            try:
                sender.sendto(text.encode(), address)
            except (OSError, ValueError) as error:  # ValueError: a NUL within
                _log.warning("The service manager was not told %s: %s", states[0], error)
