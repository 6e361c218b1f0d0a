"""Become another user, and then a store, an engine's worker or a caller that is turned away.

Usage: as_user.py UID store ARGUMENTS... | engine SOCKET ALLOWED_UID | raw SOCKET | check DIR.
Everything is imported before: the other user need not be able to read it.
"""

from __future__ import annotations

import ctypes
import encodings.ascii
import os
import socket
import sys

from ebbtide.cli import main
from ebbtide.connectors import serve
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.endpoint import check_socket_directory
from ebbtide.connectors.protocol import NamespaceOpened, OpenNamespace
from ebbtide.errors import ConfigError, TierUnavailableError

PR_SET_DUMPABLE = 4


def become(uid: int) -> None:
    """This user and the group of the same number. /proc/self stays its own, as after an exec."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def engine(path: str, allowed: int) -> str:
    """Connect with the arena. Returns how many records are held, or why not."""
    try:
        client = SocketClient(path, bytes(16), "worker", arena=True, allow_uids=[allowed])
    except TierUnavailableError as error:
        return error.problem
    try:
        assert client.arena is not None
        client.arena.view(0, 4096)[:] = bytes(4096)
        opened = ask(client, OpenNamespace([["model", "m"]]))
        assert isinstance(opened, NamespaceOpened)
        return f"{opened.records} records"
    finally:
        client.close()


def raw(path: str) -> str:
    """Connect, say nothing, and return in hex what the store says until it closes."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(path)
        said = b""
        while part := peer.recv(4096):
            said += part
        return said.hex()


def check(directory: str) -> str:
    """Whether a socket may lie in the directory, in the words of the refusal."""
    try:
        check_socket_directory(directory)
    except ConfigError as error:
        return error.problem
    return "ok"


if __name__ == "__main__":
    user, role, *words = sys.argv[1:]
    assert encodings.ascii
    assert serve
    become(int(user))
    if role == "store":
        sys.exit(main(["serve", *words]))
    if role == "engine":
        print(engine(words[0], int(words[1])))  # noqa: T201
    else:
        print({"raw": raw, "check": check}[role](words[0]))  # noqa: T201
