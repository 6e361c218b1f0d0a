"""Sends batches of KV events over ZeroMQ, and again to those who missed some. The one file of this
package that does I/O.

Facts (as vLLM 0.32). A batch is one message of three frames on a PUB socket: topic, sequence number
(8 bytes, big-endian, from 0 and one more per batch), MessagePack. A replay request to the ROUTER
socket is an empty frame and the first wanted sequence number; the answer is one message per batch
that is still kept, each an empty frame before the three, and an end: empty frame, empty topic,
eight 0xff bytes, empty payload. Rank r of a data-parallel group adds r to TCP ports and `_dp<r>` to
inproc names. Subscribers connect when they like: what was sent before that, they ask for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

import msgspec

from ebbtide.allocator.events import EventBatch
from ebbtide.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from types import ModuleType

    import zmq

logger = logging.getLogger(__name__)

VLLM_ENDPOINT = "tcp://*:5557"
"""Where vLLM publishes by default: on every interface, to whoever reaches the port."""

SHUTDOWN_S = 1.0
REPLAY_POLL_S = 0.1
REQUEST_MAX_BYTES = 1024
END_OF_REPLAY = b"\xff" * 8
_ANY_PORT = "tcp://*:0"
# Where a packet to the outside would leave from. Nothing is sent there.
_OUTSIDE = ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888"))


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of data-parallel rank `rank`, given that of rank 0 (as vLLM 0.32).

    A TCP port of 0 stays, as the system chooses one. Raises ConfigError for a scheme that has no
    ranks, a port that is no number or one that is out of range.
    """
    if rank == 0:
        return endpoint
    scheme, _, _ = endpoint.partition("://")
    if scheme == "inproc":
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or int(port) + rank > 65_535:
        raise ConfigError(
            "this endpoint cannot be shared out among data-parallel ranks",
            next_step="Use tcp://HOST:PORT or inproc://NAME",
            endpoint=endpoint,
            rank=rank,
        )
    return endpoint if int(port) == 0 else f"{base}:{int(port) + rank}"


class EventPublisher:
    """Publishes on `endpoint` from a thread of its own, so that a step never waits for a socket.

    Binds an endpoint with `*` or `::`, and any of ipc and inproc; connects to every other one (as
    vLLM 0.32). `tcp://*:0` binds this machine's address, or `host`, at a port that the system
    chooses; `endpoint` then names both. Whoever can reach the endpoint reads the token ids of all
    prompts; the socket file of an ipc endpoint is open to this user alone. `inproc` needs the
    `context` that its subscribers use, to be terminated after `shutdown`; any other publisher has a
    context of its own.

    Bounds: `max_queue_size` batches wait for the thread, a batch beyond them is dropped and leaves
    a gap in the sequence; `hwm` messages wait for a slow subscriber, beyond them ZeroMQ drops;
    `buffer_steps` sent batches are kept for replays, if there is a `replay_endpoint`. Each of these
    counts batches, whose size depends on the steps.

    `publish` and `shutdown` belong to one thread. Raises ConfigError without pyzmq, for a bound
    below 1 and for an endpoint that cannot be had.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        rank: int = 0,
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        host: str | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        _check_bounds(buffer_steps=buffer_steps, hwm=hwm, max_queue_size=max_queue_size)
        self._zmq = zmq = _import_zmq()
        self._rank = rank
        self._topic = topic.encode()
        self._queue: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._next_sequence = 0
        self._deadline: float | None = None  # set by shutdown
        self.sent_batches = 0
        self.dropped_batches = 0
        self.malformed_requests = 0
        self.endpoint = rank_endpoint(endpoint, rank)
        self.replay_endpoint = rank_endpoint(replay_endpoint, rank) if replay_endpoint else None
        if context is None and any(
            str(each).startswith("inproc:") for each in (endpoint, replay_endpoint)
        ):
            raise ConfigError(
                "an inproc endpoint is reached only through the context it was made in",
                next_step="Pass the context of the subscribers",
                endpoint=endpoint,
            )
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        try:
            self._pub.set_hwm(hwm)
            self.endpoint = self._open(self._pub, self.endpoint, host)
            if self._replay is not None and self.replay_endpoint:
                # All that is kept fits into the queue of one client: a replay is not cut short.
                self._replay.set_hwm(buffer_steps + 1)
                self._replay.setsockopt(zmq.MAXMSGSIZE, REQUEST_MAX_BYTES)
                self.replay_endpoint = self._open(self._replay, self.replay_endpoint, host)
        except ConfigError:
            self._close_sockets(linger_s=0)
            self._end_context()
            raise
        self._thread = threading.Thread(target=self._run, name="ebbtide-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def publish(self, batch: EventBatch) -> int | None:
        """Queue one batch and return its sequence number. Never waits. O(1).

        A batch without a rank goes out with the publisher's. The events belong to the publisher
        from now on. Returns None, and counts it in `dropped_batches`, when the queue is full; its
        number is used up, so that subscribers see a gap. Raises MisuseError after `shutdown`.
        """
        if self._deadline is not None:
            raise MisuseError("the event publisher was shut down", endpoint=self.endpoint)
        if batch.data_parallel_rank is None:
            batch = EventBatch(batch.ts, batch.events, self._rank)
        sequence = self._next_sequence
        self._next_sequence += 1
        try:
            self._queue.put_nowait((sequence, batch))
        except queue.Full:
            self._dropped(1, "the queue is full")
            return None
        return sequence

    def shutdown(self) -> None:
        """Send what is queued, for up to `SHUTDOWN_S`, and end thread and sockets. Idempotent.

        What does not go out in that time is counted in `dropped_batches`.
        """
        self._deadline = time.monotonic() + SHUTDOWN_S
        # Wakes a thread that waits. A thread with a full queue does not wait, and looks again.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join()
        self._end_context()

    def _run(self) -> None:
        try:
            while self._deadline is None or time.monotonic() < self._deadline:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                ending = self._deadline is not None  # read before the queue: nothing comes after
                item = self._next_item(ending)
                if item is not None:
                    self._send(*item)
                elif ending:
                    break
        finally:
            left = 0
            while not self._queue.empty():
                left += self._queue.get_nowait() is not None
            if left:
                self._dropped(left, "the publisher was shut down")
            self._close_sockets(linger_s=max(0.0, (self._deadline or 0) - time.monotonic()))

    def _next_item(self, ending: bool) -> tuple[int, EventBatch] | None:
        """None when there is nothing to send now, but a request or a shutdown may be waiting."""
        timeout_s = None if self._replay is None else REPLAY_POLL_S
        try:
            return self._queue.get(not ending, timeout_s)
        except queue.Empty:
            return None

    def _send(self, sequence: int, batch: EventBatch) -> None:
        try:
            payload = self._encoder.encode(batch)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            self._dropped(1, f"it cannot be encoded: {error}")
            return
        self._kept.append((sequence, payload))
        try:
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        except self._zmq.ZMQError as error:
            self._dropped(1, f"{error}; a replay still has it")
            return
        self.sent_batches += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Serve one replay request, which is there."""
        try:
            client, *request = replay.recv_multipart(self._zmq.NOBLOCK)
            if len(request) != 2 or request[0] or len(request[1]) != 8:
                self.malformed_requests += 1
                if _is_power_of_two(self.malformed_requests):
                    logger.warning(
                        "A replay request was ignored: it is not an empty frame and 8 bytes. "
                        "%d so far.",
                        self.malformed_requests,
                    )
                return
            first = int.from_bytes(request[1], "big")
            for sequence, payload in self._kept:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    return
                if sequence >= first:
                    frames = (self._topic, sequence.to_bytes(8, "big"), payload)
                    replay.send_multipart((client, b"", *frames))
            replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
        except self._zmq.ZMQError as error:
            logger.warning("A replay request was not served: %s", error)

    def _dropped(self, count: int, why: str) -> None:
        self.dropped_batches += count
        if count > 1 or _is_power_of_two(self.dropped_batches):
            logger.warning(
                "A batch of KV events was not sent, as %s. %d so far.", why, self.dropped_batches
            )

    def _open(self, one: zmq.Socket[bytes], endpoint: str, host: str | None) -> str:
        """Bind or connect; the endpoint under which others find the socket."""
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        if one is self._replay:
            binds = True
        if endpoint == _ANY_PORT:
            address = host or _address()
            endpoint = f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0"
        if "[" in endpoint:
            one.setsockopt(self._zmq.IPV6, 1)
        try:
            if not binds:
                one.connect(endpoint)
                return endpoint
            one.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                "the event publisher cannot use its endpoint",
                next_step="Choose an endpoint that is free and of this machine",
                endpoint=endpoint,
                cause=str(error),
            ) from error
        bound = one.getsockopt_string(self._zmq.LAST_ENDPOINT).rstrip("\0")
        if bound.startswith("ipc://") and not bound.startswith("ipc://@"):
            os.chmod(bound.removeprefix("ipc://"), 0o600)
        return bound if endpoint.endswith((":0", ":*", "ipc://*")) else endpoint

    def _close_sockets(self, linger_s: float) -> None:
        for one in (self._pub, self._replay):
            if one is not None:
                one.close(linger=int(linger_s * 1000))

    def _end_context(self) -> None:
        if self._owns_context:
            self._context.term()


def _check_bounds(**bounds: int) -> None:
    for name, bound in bounds.items():
        if bound < 1:
            raise ConfigError(f"{name} of the event publisher is below 1", value=bound)


def _import_zmq() -> ModuleType:
    try:
        import zmq
    except ImportError as error:
        raise ConfigError(
            "publishing KV events needs pyzmq",
            next_step="Install it: pip install 'ebbtide[events]'",
            cause=str(error),
        ) from error
    return zmq


def _address() -> str:
    """The address of this machine that others would see. Raises ConfigError without a network."""
    for family, outside in _OUTSIDE:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 53))
            except OSError:
                continue
            address: str = probe.getsockname()[0]
            return address
    raise ConfigError(
        "tcp://*:0 needs an address of this machine, and it has no way out to tell it by",
        next_step="Pass `host`, or choose a port",
    )


def _is_power_of_two(number: int) -> bool:
    """Log lines at counts that double: many faults make few lines."""
    return number & (number - 1) == 0
