"""The ceiling of a round trip in `ebbtide bench daemon`: the same bytes each way, and no work.

A process of its own behind a Unix socket of its own, as the store is; one connection at a time.
"""

from __future__ import annotations

import socket
import struct
import sys

HEAD = struct.Struct("<II")  # bytes of a request, bytes of its answer; both zero: no more
RECEIVE_BYTES = 64 << 10


class RawClient:
    """Round trips to `main`'s process. One thread."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._inbox = bytearray(RECEIVE_BYTES)
        self._request = self._answer_bytes = 0

    def sizes(self, request_bytes: int, answer_bytes: int) -> None:
        """From now on each round trip has these."""
        self._socket.sendall(HEAD.pack(request_bytes, answer_bytes))
        self._request, self._answer_bytes = request_bytes, answer_bytes

    def ask(self, request: bytes) -> None:
        """One round trip."""
        assert len(request) == self._request
        self._socket.sendall(request)
        left = self._answer_bytes
        while left:
            left -= self._socket.recv_into(self._inbox, min(left, RECEIVE_BYTES))

    def done(self) -> None:
        """Other sizes follow."""
        self._socket.sendall(bytes(self._request - 1) + b"\1")

    def close(self) -> None:
        self._socket.close()


def main(path: str) -> None:
    """Serve until standard input ends or a signal comes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        print("ready", flush=True)
        while True:
            peer, _ = listener.accept()
            with peer:
                while _serve(peer):
                    pass


def _serve(peer: socket.socket) -> bool:
    """Round trips of one size. False: the peer has gone."""
    head = _receive(peer, HEAD.size)
    if head is None:
        return False
    request_bytes, answer_bytes = HEAD.unpack(head)
    answer = bytes(answer_bytes)
    while True:
        request = _receive(peer, request_bytes)
        if request is None:
            return False
        if request[-1] == 1:  # see `RawClient.done`
            return True
        peer.sendall(answer)


def _receive(peer: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    view, got = memoryview(found), 0
    while got < size:
        more = peer.recv_into(view[got:])
        if not more:
            return None
        got += more
    return found


if __name__ == "__main__":
    main(sys.argv[1])
