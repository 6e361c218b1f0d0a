"""A namespace that stays open across stores: handles die with the store that gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import LOST

if TYPE_CHECKING:
    from ebbtide.connectors.client import Client, Completion


class NamespaceLink:
    """The handle of one descriptor at the store that answers now. Never waits."""

    def __init__(
        self, client: Client, descriptor: list[list[object]], *, pending: bool = False
    ) -> None:
        """`pending`: the content is not known for sure yet, so that every key is a miss."""
        self._client = client
        self._descriptor = descriptor
        self._pending = pending
        self._incarnation = 0
        self._ticket = 0
        self._handle: int | None = None
        self.digest = b""  # of the namespace that was opened last
        self.held_records = 0
        self.held_bytes = 0

    @property
    def handle(self) -> int | None:
        """None while no store is known to have the namespace open.

        Another store may give the same number to other content, so a handle is worth nothing from
        the moment at which the client has reached that store.
        """
        return self._handle if self._client.incarnation == self._incarnation else None

    @property
    def descriptor(self) -> list[list[object]]:
        """The content that was described last."""
        return self._descriptor

    @property
    def opening(self) -> bool:
        """A store was asked for the namespace and has not answered yet."""
        return bool(self._ticket) and self._client.incarnation == self._incarnation

    @property
    def pending(self) -> bool:
        """The content is not known for sure yet."""
        return self._pending

    def describe(self, descriptor: list[list[object]], *, pending: bool = False) -> None:
        """From the next `renew` on, the namespace is another one."""
        self._descriptor, self._pending = descriptor, pending
        self._incarnation, self._ticket, self._handle = 0, 0, None

    def renew(self) -> bool:
        """Ask a new store for the namespace. True when the store changed since the last call."""
        incarnation = self._client.incarnation
        if incarnation == self._incarnation:
            return False
        ticket = self._client.submit(wire.OpenNamespace(self._descriptor, self._pending))
        self._incarnation, self._ticket, self._handle = incarnation, ticket, None
        return True

    def take(self, completion: Completion) -> bool:
        """Whether the completion was ours alone. Any may tell that the store has gone."""
        if completion.message == LOST:
            self._handle = None
        if completion.ticket != self._ticket or not self._ticket:
            return False
        self._ticket = 0
        if isinstance(completion.message, wire.NamespaceOpened):
            self._handle = completion.message.namespace
            self.digest = completion.message.digest
            self.held_records = completion.message.records
            self.held_bytes = completion.message.bytes
        return True
