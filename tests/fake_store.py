"""A store that answers as a test wants it to: a listening socket and a thread."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from ebbtide.connectors import protocol as wire

if TYPE_CHECKING:
    from collections.abc import Callable

ARENA_BYTES = 1 << 16


def welcome(
    arena_bytes: int = ARENA_BYTES,
    generation: int = 1,
    protocol: tuple[int, int] = wire.VERSION,
) -> wire.Welcome:
    """A greeting."""
    sizes = (arena_bytes, 4096, 1 << 14, wire.FRAME_BYTES_MAX)
    return wire.Welcome(bytes(16), generation, *sizes, protocol)


class FakeStore:
    """A listening socket whose thread answers each HELLO as the test says."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.greet: Callable[[socket.socket], None] = self.welcome
        self.peers: list[socket.socket] = []
        self.generation = 0
        self.protocol = wire.VERSION
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            self.peers.append(peer)
            if not peer.recv(4096):
                return
            self.greet(peer)

    def welcome(self, peer: socket.socket) -> None:
        """Greet without an arena."""
        self.generation += 1
        peer.sendall(wire.encode(0, welcome(ARENA_BYTES, self.generation, self.protocol)))

    def welcome_with(self, fd: int, arena_bytes: int = ARENA_BYTES) -> Callable[..., None]:
        """Greet with this descriptor."""

        def greet(peer: socket.socket) -> None:
            self.generation += 1
            frame = wire.encode(0, welcome(arena_bytes, self.generation))
            socket.send_fds(peer, [frame], [fd])

        return greet

    def read(self, count: int = 1) -> list[tuple[int, wire.Message]]:
        """The next frames of the last client."""
        decoder = wire.Decoder()
        found: list[tuple[int, wire.Message]] = []
        while len(found) < count:
            found += decoder.feed(self.peers[-1].recv(1 << 16))
        return found

    def say(self, ticket: int, message: wire.Message) -> None:
        """Send a frame to the last client."""
        self.peers[-1].sendall(wire.encode(ticket, message))

    def drop(self) -> None:
        """End the last connection."""
        self.peers[-1].close()

    def close(self) -> None:
        """End everything."""
        ender = socket.socket(socket.AF_UNIX)
        ender.connect(self.path)
        ender.close()
        self._thread.join()
        self._listener.close()
        for peer in self.peers:
            peer.close()
