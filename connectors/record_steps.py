"""Putting and getting records as steps that wait for nothing: the same for both clients of Python.

A step yields an `Exchange` and is sent the message that ended it; what it returns is the result.

Digests are taken where the bytes are: of what the caller gave, and of the very copy that the caller
gets. So they tell of whatever goes wrong in between, and cost the store nothing. A store that is
older than this takes and checks them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client_interface import LOST, error_of
from ebbtide.errors import ConfigError, MisuseError
from ebbtide.tiers.digest import copy_and_digest, record_digest, record_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from ebbtide.connectors.client import SocketClient

HASH_WIDTHS = (32, 16)


class Exchange(NamedTuple):
    """A request, and who takes the answers before the last one, with the request's ticket."""

    message: wire.Message
    part: Callable[[int, wire.Message], None] | None = None


Result = TypeVar("Result")
if TYPE_CHECKING:
    Steps = Generator[Exchange, wire.Message, Result]


def key_of(block_hash: bytes, group: int = 0) -> bytes:
    """A key: the block hash, never padded or cut, and the KV group. Raises MisuseError."""
    if type(block_hash) is not bytes or len(block_hash) not in HASH_WIDTHS or group >> 32:
        raise MisuseError(
            "A block hash is 32 or 16 bytes, a KV group an unsigned number of 32 bits",
            next_step="Hash what names the record: hashlib.sha256(name).digest().",
        )
    return block_hash + group.to_bytes(4, "big")


class Space:
    """One namespace as one client sees it: its handle is void when the store is another one."""

    def __init__(self, descriptor: list[list[object]]) -> None:
        self.descriptor = descriptor
        self._digest = b""  # the same at every store
        self._incarnation = 0
        self._handle = 0

    def handle(self, client: SocketClient) -> Steps[int | None]:
        """The handle at the present store. None: no store answers. Raises what it refuses."""
        if not client.connected or client.incarnation != self._incarnation:
            answer = yield Exchange(wire.OpenNamespace(self.descriptor))
            if not isinstance(answer, wire.NamespaceOpened):
                _raise_misuse(answer)
                return None
            self._incarnation, self._handle = client.incarnation, answer.namespace
            self._digest = answer.digest
        return self._handle

    def seed(self, key: bytes) -> int:
        """Of the digest of a record of this namespace, whose handle is known."""
        return record_seed(self._digest, key)


def put_steps(client: SocketClient, space: Space, records: Mapping[bytes, bytes]) -> Steps[int]:
    """Store records of one size. Returns how many of the first are held now."""
    handle = yield from space.handle(client)
    sizes = {len(payload) for payload in records.values()}
    if handle is None or not records:
        return 0
    if len(sizes) > 1 or not min(sizes):
        raise MisuseError("The records of a call have one size, of a byte at least", got=sizes)
    life = client.incarnation
    answer = yield Exchange(wire.Reserve(handle, sizes.pop(), tuple(records)))
    if not isinstance(answer, wire.Grants):
        _raise_misuse(answer)
        return 0
    if client.incarnation != life or client.arena is None:  # its offsets are of another arena
        return 0
    new = []
    for (key, payload), (offset, sequence) in zip(records.items(), answer.grants, strict=False):
        if sequence:
            slot = client.arena.view(offset, len(payload))
            mine = memoryview(payload)
            new.append((sequence, copy_and_digest(slot, mine, mine, space.seed(key))))
    if not new:
        return len(answer.grants)
    commit: wire.Message = wire.CommitDigests(tuple(new))
    if client.protocol < wire.DIGESTS_SINCE:
        commit = wire.Commit(tuple(sequence for sequence, _ in new))
    settled = yield Exchange(commit)
    if not isinstance(settled, wire.Settled):
        return 0
    return len(answer.grants) - sum(code != 0 for code in settled.codes)


def get_steps(
    client: SocketClient, space: Space, keys: Sequence[bytes]
) -> Steps[dict[bytes, bytes]]:
    """Load records, verified. Returns those that came."""
    found: dict[bytes, bytes] = {}
    handle = yield from space.handle(client)
    if handle is None or not keys:
        return found
    life = client.incarnation
    wanted = tuple(dict.fromkeys(keys))

    def take(ticket: int, message: wire.Message) -> None:
        if client.incarnation != life or isinstance(message, wire.Failed):
            return
        assert client.arena is not None
        wrong: list[int] = []
        if isinstance(message, wire.Batch):
            for position, length, _, offset in message.granted:
                found[wanted[position]] = bytes(client.arena.view(offset, length))
        else:
            assert isinstance(message, wire.BatchToVerify)
            for row, (position, length, _, offset, digest) in enumerate(message.granted):
                key, payload = wanted[position], bytes(client.arena.view(offset, length))
                if record_digest(payload, space.seed(key)) == digest:
                    found[key] = payload
                else:
                    wrong.append(row)
        client.notify(
            wire.Dispute(ticket, message.batch, tuple(wrong))
            if wrong
            else wire.Ack(ticket, message.batch)
        )

    load: wire.Message = wire.LoadToVerify(handle, wanted)
    if client.protocol < wire.DIGESTS_SINCE:
        load = wire.LoadKeys(handle, wanted)
    _raise_misuse((yield Exchange(load, take)))
    return found


def give_back(client: SocketClient, message: wire.Message, ticket: int) -> None:
    """An answer to a call that was given up: what it grants is the store's again."""
    if isinstance(message, wire.Batch | wire.BatchToVerify):
        client.notify(wire.Ack(ticket, message.batch))
    elif isinstance(message, wire.Grants):
        sequences = tuple(sequence for _, sequence in message.grants if sequence)
        if sequences:
            client.submit(wire.Abort(sequences))


def _raise_misuse(answer: wire.Message) -> None:
    """What the caller did wrong is raised. What the store lacks is a miss."""
    if isinstance(answer, wire.Failure) and answer != LOST:
        error = error_of(answer)
        if isinstance(error, ConfigError | MisuseError):
            raise error
