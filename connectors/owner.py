"""How a command reaches the store that runs on a disk directory: by the socket that LOCK names."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, Any

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.endpoint import answers
from ebbtide.errors import ConfigError
from ebbtide.tiers.fsck import Report
from ebbtide.tiers.lock_file import find_owner

if TYPE_CHECKING:
    from collections.abc import Callable

PURGE_TIMEOUT_S = 3600.0  # of writing zeros
ANSWER_TIMEOUT_S = 60.0  # longer than a drive may hang before the store takes it out of service
PAUSE_S_MAX = 1.0
COMMANDS_SINCE = (1, 1)
CHOICE_SINCE = (1, 2)


class OwnerClient:
    """A connection of a command. One thread; a context manager."""

    def __init__(self, socket: str) -> None:
        """Raises TierUnavailableError when nobody answers, ConfigError when an older store does.

        Whoever names a socket means its owner: that user's store is trusted.
        """
        self._client = SocketClient(
            socket,
            os.urandom(16),
            wire.COMMAND_ROLE,
            arena=False,
            allow_uids=[os.stat(socket).st_uid],
        )
        try:
            self._need(COMMANDS_SINCE)
        except ConfigError:
            self._client.close()
            raise

    def __enter__(self) -> OwnerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def check(self, progress: Callable[[int, int], None]) -> Report:
        """Have every record verified. Blocks; pauses as long as the store has worked, so that
        engines keep half of the drive at least.
        """
        total = Report(by_store=True)
        start: int | None = 0
        while start is not None:
            begun = time.monotonic()
            piece = self._report(wire.Check(start))
            _add(total, piece)
            progress(total.records, max(total.records, piece["held"]))
            start = piece["next"]
            if start is not None:
                time.sleep(min(PAUSE_S_MAX, time.monotonic() - begun))
        return total

    def survey(self) -> dict[str, Any]:
        """What every namespace holds and what became of its records. Blocks."""
        found: dict[str, Any] = {"namespaces": []}
        start: int | None = 0
        while start is not None:
            answer = self._report(wire.Describe(start))
            found["namespaces"] += answer["namespaces"]
            found["store"] = answer["store"]
            start = answer["next"]
        return found

    def purge(self, digest: bytes) -> dict[str, Any]:
        """Have a namespace forgotten and its bytes overwritten. Blocks until that is durable."""
        return self._report(wire.Purge(digest), PURGE_TIMEOUT_S)

    def reset(self, digest: bytes | None) -> None:
        """Have a namespace forgotten, or all. Blocks until that is durable."""
        self._need(CHOICE_SINCE)
        handle = wire.ALL_NAMESPACES
        if digest is not None:
            found = ask(self._client, wire.Find(digest), ANSWER_TIMEOUT_S)
            assert isinstance(found, wire.NamespaceOpened)
            handle = found.namespace
        ask(self._client, wire.Reset(handle), ANSWER_TIMEOUT_S)

    def pin(self, digest: bytes, keys: tuple[bytes, ...]) -> dict[str, Any]:
        """Have records kept in memory; no keys: all of the namespace that memory holds. Raises
        NoSpaceError beyond the bound.
        """
        self._need(CHOICE_SINCE)
        return self._report(wire.PinRecords(digest, keys))

    def unpin(self, digest: bytes, keys: tuple[bytes, ...]) -> dict[str, Any]:
        """Undo `pin`."""
        self._need(CHOICE_SINCE)
        return self._report(wire.UnpinRecords(digest, keys))

    def _need(self, version: tuple[int, int]) -> None:
        if self._client.protocol < version:
            raise ConfigError(
                "The store is older than this command",
                next_step="Stop the store first, or use the ebbtide that it runs.",
                protocol=self._client.protocol,
            )

    def _report(self, request: wire.Message, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        answer = ask(self._client, request, timeout_s)
        assert isinstance(answer, wire.Report)
        return answer.report


def reach_owner(place: str) -> OwnerClient | None:
    """The store that listens on a socket, or that runs on a disk directory.

    None: none does on the directory, or none that listens (yet, or any more): what is done then is
    done under the directory's own lock.
    """
    if is_socket(place):
        return OwnerClient(place)
    owner = find_owner(place)
    if owner is None or not owner.socket or not answers(owner.socket):
        return None
    return OwnerClient(owner.socket)


def reach_running(place: str) -> OwnerClient:
    """The same, for what only a store that runs can do. Raises ConfigError when there is none."""
    owner = reach_owner(place)
    if owner is None:
        raise ConfigError(
            "No store runs there",
            next_step="Name the socket of a store, or the [disk] path of one that runs.",
            place=place,
        )
    return owner


def is_socket(place: str) -> bool:
    """Whether the path is a socket's."""
    try:
        return stat.S_ISSOCK(os.stat(place).st_mode)
    except OSError:
        return False


def _add(total: Report, piece: dict[str, Any]) -> None:
    total.records += piece["records"]
    total.sound += piece["sound"]
    total.garbage += piece["garbage"]
    total.payload_bytes += piece["payload_bytes"]
    for what, count in piece["bad"].items():
        total.bad[what] = total.bad.get(what, 0) + count
        total.repaired += count  # the store has dropped it: nobody is served a wrong byte
    total.namespaces = piece["namespaces"]
    if not total.slab_bytes:
        total.slab_bytes = total.unused_bytes = piece["slab_bytes"]
    total.unused_bytes -= piece["slot_bytes"]
