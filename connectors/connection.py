"""One client's socket at the store: frames in, frames out, bounded both ways."""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.endpoint import peer_process
from ebbtide.connectors.session import Session, check_request, failure_of
from ebbtide.errors import ProtocolError
from ebbtide.tiers.supervisor import supervised

if TYPE_CHECKING:
    from ebbtide.connectors.server import StoreServer
    from ebbtide.connectors.turns import Pieces

_log = logging.getLogger("ebbtide.server")

OUTBOX_BYTES_MAX = 4 * wire.FRAME_BYTES_MAX  # a client that does not read is cut off

FAULT = wire.Failure("EbbtideError", "The store met a fault of its own; its log has the trace")


class Connection:
    """One client's socket. Frames in, frames out, bounded both ways."""

    def __init__(self, server: StoreServer, peer: socket.socket) -> None:
        self._server = server
        self._peer = peer
        self._loop = server.loop
        self._decoder = wire.Decoder(server.welcome.frame_bytes_max)
        self._outbox = bytearray()
        self._arena_fd: int | None = None  # to ride with the next byte
        self._waiting = False  # for the peer to read
        self._closed = False
        self.session: Session | None = None
        self._lane = server.turns.lane(self._pieces, self._met_fault)
        self._reading = True
        self._loop.add_reader(peer, self._readable)

    def send(self, ticket: int, message: wire.Message) -> None:
        if self._closed:
            return
        self._outbox += wire.encode(ticket, message)
        if not self._waiting:
            self._writable()
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            _log.warning("A client does not read its answers; its connection ends")
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._peer)
        self._loop.remove_writer(self._peer)
        self._peer.close()
        self._outbox.clear()
        self._decoder.forget()
        self._lane.close()
        if self.session is not None:
            self.session.disconnected()
        self._server.connection_closed(self)

    def _readable(self) -> None:
        inbox = self._server.inbox
        try:
            size = self._peer.recv_into(inbox)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        read_at = time.perf_counter()
        try:
            messages = self._decoder.feed(inbox[:size])
        except ProtocolError as error:
            self._refuse(error)
            return
        for ticket, message in messages:
            if self._closed:
                return
            if not supervised(self._take, ticket, message):
                self._met_fault(ticket, message)
            self._server.traffic.handled(message, time.perf_counter() - read_at)
        if self._lane.is_full and not self._closed:
            self._reading = False  # its own stores first; whoever else has sent something goes on
            self._loop.remove_reader(self._peer)

    def _take(self, ticket: int, message: wire.Message) -> None:
        try:
            if self.session is None:
                self._greet(message)
            elif self._lane.takes(message):
                check_request(ticket, message)  # now: by its turn the peer may have gone
                self._lane.put(ticket, message)
            else:
                self.session.handle(ticket, message)
        except ProtocolError as error:
            self._refuse(error)

    def _pieces(self, ticket: int, message: wire.Message) -> Pieces:
        """Deal with a message that has waited for its turn."""
        assert self.session is not None
        if not (self._reading or self._closed or self._lane.is_full):
            self._reading = True
            self._loop.add_reader(self._peer, self._readable)
        try:
            yield from self.session.pieces(ticket, message)
        except ProtocolError as error:
            self._refuse(error)

    def _met_fault(self, ticket: int, message: wire.Message) -> None:
        self._server.count_fault()
        if message.answered:
            self.send(ticket, FAULT)

    def _refuse(self, error: ProtocolError) -> None:
        _log.warning("A connection ends: %s", error)
        self._server.traffic.refused["protocol"] += 1
        self.send(0, failure_of(error))
        self.close()

    def _greet(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Hello):
            raise ProtocolError("The first frame must be HELLO", kind=message.kind)
        if message.protocol[0] != wire.VERSION[0]:
            raise ProtocolError(
                "The client speaks another protocol",
                next_step="Use the same ebbtide on both sides.",
                client=message.protocol,
                store=wire.VERSION,
            )
        process = None
        if message.arena:
            try:
                process = peer_process(self._peer)
            except OSError as error:
                raise ProtocolError(
                    "The store cannot watch this process, so it cannot lend it the arena",
                    reason=error.strerror,
                ) from error
            self._arena_fd = self._server.store.arena.fd
        _log.info("engine %s: a %r connects", message.engine.hex(), message.role)
        self.session = Session(self._server.store, message.engine, self.send)
        works = message.role != wire.COMMAND_ROLE
        self._server.engine_connected(message.engine, self, process, works=works)
        self.send(0, self._server.welcome)

    def _writable(self) -> None:
        while self._outbox and not self._closed:
            try:
                sent = self._transmit()
            except BlockingIOError:
                if not self._waiting:
                    self._waiting = True
                    self._loop.add_writer(self._peer, self._writable)
                return
            except OSError:
                # Not at once: whoever sends may be in the middle of its own bookkeeping.
                self._outbox.clear()
                self._loop.call_soon(self.close)
                return
            del self._outbox[:sent]
        if self._waiting and not self._closed:
            self._waiting = False
            self._loop.remove_writer(self._peer)

    def _transmit(self) -> int:
        if self._arena_fd is None:
            return self._peer.send(self._outbox)
        sent = socket.send_fds(self._peer, [self._outbox], [self._arena_fd])
        self._arena_fd = None
        return sent
