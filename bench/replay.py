"""`ebbtide replay TRACE`: a recorded trace against a real store, with real bytes.

Each request asks for its whole chain, as an engine would: what the store holds from the start of
the chain on is loaded and every byte of it compared; the rest counts as computed, is written and
offered. Records behind a gap are misses even when the store holds them. `docs/replay.md` has the
method and the meaning of every number.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ebbtide.bench.progress import progress
from ebbtide.bench.records import RecordContents, block_key
from ebbtide.bench.rig import Rig, parse_capacity
from ebbtide.bench.trace import read_header, read_requests
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask, error_of
from ebbtide.errors import ConfigError, MisuseError, TierUnavailableError
from ebbtide.machine import describe_machine
from ebbtide.sizes import format_size, parse_size
from ebbtide.tiers.reasons import Miss, Place, label

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ANSWER_S = 60.0  # a store that says nothing for so long is broken: the replay fails
OFFER_PATIENCE_S = 5.0  # how long a request waits for slots without getting any, before it sheds
POLL_S = 0.02
Report = dict[str, Any]
TIERS = (Place.MEMORY, Place.DISK)


class Replay:
    """One client that replays requests, one after the other, and counts every block once."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._client = rig.client
        self.record_bytes = rig.record_bytes
        self._contents = RecordContents(rig.store.arena.buffer, rig.record_bytes)
        opened = self._ask(wire.OpenNamespace(_descriptor(rig.record_bytes)))
        assert isinstance(opened, wire.NamespaceOpened)
        self._namespace = opened.namespace
        self.found = opened.records  # records that an earlier run left in the directory
        self.requests = 0
        self.blocks = 0
        self.hits: Counter[Place] = Counter()
        self.misses: Counter[str] = Counter()
        self.shed = 0  # blocks that were offered and not taken
        self.wrong_bytes = 0
        self.wrong_records = 0
        self.read_records = 0
        self.written_records = 0

    @property
    def hit_rate(self) -> float:
        """Hit blocks / all blocks so far, first sights included; 0 for no blocks."""
        return self.hits.total() / self.blocks if self.blocks else 0.0

    def request(self, block_ids: Sequence[int]) -> None:
        """Replay one request. Blocks until its blocks are loaded, and stored or shed.

        The chain is touched before anything of it is stored, so that storing evicts no block of
        it, and again behind that: only then the order of eviction is the chain's own, tail first,
        whichever of its blocks are new.
        """
        self.requests += 1
        self.blocks += len(block_ids)
        if not block_ids:
            return
        keys = tuple(block_key(block_id) for block_id in block_ids)
        states = self._ask(wire.Lookup(self._namespace, keys))
        assert isinstance(states, wire.States)
        codes = list(states.codes)
        self._touch(keys)
        held = _prefix(codes)
        if held:
            codes[:held] = self._load(keys[:held])
        hits = self._count(codes)
        if hits < len(keys):
            self._offer(keys, hits)

    def check_sums(self) -> None:
        """Raise MisuseError unless every block was counted once, as a hit or by its reason."""
        counted = self.hits.total() + self.misses.total()
        if counted != self.blocks:
            raise MisuseError("Blocks were lost in counting", blocks=self.blocks, counted=counted)

    def disk_stats(self) -> dict[str, Any]:
        """The store's own numbers of its disk tier; empty without one."""
        answer = self._ask(wire.Stats())
        assert isinstance(answer, wire.Report)
        found: dict[str, Any] = answer.report.get("disk", {})
        return found

    def bytes_by_edge(self, disk: dict[str, Any]) -> dict[str, int]:
        """Payload bytes to and from the engine; whole slots between memory and disk."""
        return {
            "engine_to_memory": self.written_records * self.record_bytes,
            "memory_to_engine": self.read_records * self.record_bytes,
            "memory_to_disk": disk.get("demoted_bytes", 0),
            "disk_to_memory": disk.get("read_bytes", 0),
        }

    # -- inside ---------------------------------------------------------------------------------

    def _ask(self, message: wire.Message) -> wire.Message:
        return ask(self._client, message, ANSWER_S)

    def _touch(self, keys: tuple[bytes, ...]) -> None:
        self._client.notify(wire.Touch(self._namespace, keys))

    def _count(self, codes: Sequence[int]) -> int:
        """Count a request's blocks; returns how many were hits."""
        hits = _prefix(codes)
        self.hits.update(Place(code) for code in codes[:hits])
        if hits < len(codes):
            self.misses[label(codes[hits])] += 1
            self.misses[label(Miss.BEHIND_MISS)] += len(codes) - hits - 1
        return hits

    def _load(self, keys: tuple[bytes, ...]) -> list[int]:
        """Load and compare; returns the tier each record came from, or why it did not come."""
        outcome: list[int] = [Miss.UNKNOWN] * len(keys)
        ticket = self._client.submit(wire.LoadKeys(self._namespace, keys))
        deadline = time.monotonic() + ANSWER_S
        while True:
            done = False
            for completion in self._client.poll():
                match completion.message:
                    case wire.Batch(batch, granted):
                        for position, _, source, offset in granted:
                            outcome[position] = source
                            self._compare(keys[position], offset)
                        self._client.notify(wire.Ack(ticket, batch))
                    case wire.Failed(failures):
                        for position, reason in failures:
                            outcome[position] = reason
                    case wire.Failure() as failure:
                        raise error_of(failure)
                    case _:
                        done = completion.final
            if done:
                return outcome
            if time.monotonic() > deadline:
                raise TierUnavailableError("A load did not end in time", timeout_s=ANSWER_S)
            self._client.wait(POLL_S)

    def _compare(self, key: bytes, offset: int) -> None:
        wrong = self._contents.wrong_bytes(key, offset)
        self.read_records += 1
        self.wrong_bytes += wrong
        self.wrong_records += wrong > 0

    def _offer(self, keys: tuple[bytes, ...], first: int) -> None:
        """Write and store what was computed, from `first` on; shed what finds no slot."""
        rest = keys[first:]
        deadline = time.monotonic() + OFFER_PATIENCE_S
        while rest:
            answer = self._ask(wire.Reserve(self._namespace, self.record_bytes, rest))
            assert isinstance(answer, wire.Grants)
            if answer.grants:
                self._store(rest, answer.grants)
                self._touch(keys)
                rest = rest[len(answer.grants) :]
                deadline = time.monotonic() + OFFER_PATIENCE_S
            elif self._rig.store.disk is None or time.monotonic() > deadline:
                # With memory alone nothing is under way that could free a slot.
                self.shed += len(rest)
                return
            else:
                self._client.wait(POLL_S)

    def _store(self, keys: tuple[bytes, ...], grants: Sequence[tuple[int, int]]) -> None:
        sequences = []
        for key, (offset, sequence) in zip(keys, grants, strict=False):
            if sequence:
                self._contents.write(key, offset)
                sequences.append(sequence)
        if sequences:
            settled = self._ask(wire.Commit(tuple(sequences)))
            assert isinstance(settled, wire.Settled)
            refused = len(sequences) - settled.codes.count(0)
            self.shed += refused
            self.written_records += len(sequences) - refused


def _descriptor(record_bytes: int) -> list[list[object]]:
    return [["format", 1], ["engine", "replay/1"], ["record_bytes", record_bytes]]


def _prefix(codes: Sequence[int]) -> int:
    """How many of a chain's first blocks are in a tier."""
    for position, code in enumerate(codes):
        if code not in TIERS:
            return position
    return len(codes)


# -- the report -----------------------------------------------------------------------------------


def report_of(replay: Replay, trace: str, seconds: float, records_max: dict[str, int]) -> Report:
    """All numbers of a replay, as `--json` prints them."""
    replay.check_sums()
    hits = {label(place): replay.hits[place] for place in TIERS}
    blocks = max(replay.blocks, 1)
    disk = replay.disk_stats()
    report: Report = {
        "trace": trace,
        "requests": replay.requests,
        "blocks": replay.blocks,
        "hits": hits,
        "hit_rate": replay.hit_rate,
        "hit_rate_by_tier": {tier: count / blocks for tier, count in hits.items()},
        "misses": dict(sorted(replay.misses.items())),
        "shed": replay.shed,
        "found": replay.found,
        "wrong_bytes": replay.wrong_bytes,
        "wrong_records": replay.wrong_records,
        "compared_records": replay.read_records,
        "bytes_by_edge": replay.bytes_by_edge(disk),
        "disk_down": disk.get("down", ""),
        "record_bytes": replay.record_bytes,
        "records_max": records_max,
        "seconds": round(seconds, 3),
        "machine": describe_machine(),
    }
    report["not_exercised"] = _not_exercised(report)
    return report


def _not_exercised(report: Report) -> list[str]:
    """What this replay says nothing about."""
    edges, hits = report["bytes_by_edge"], report["hits"]
    missing = []
    if not report["blocks"]:
        missing.append("anything: the trace asked for no block")
    if not any(hits.values()):
        missing.append("reading: no block was hit")
    elif not hits["memory"]:
        missing.append("the memory tier: it served no block")
    if "evicted" not in report["misses"]:
        missing.append("the cost of eviction: no block was missed because it had been evicted")
    if report["records_max"]["disk"]:
        if not edges["memory_to_disk"]:
            missing.append("demotion: nothing was written to the disk tier")
        if not hits["disk"]:
            missing.append("the disk tier: it served no block")
    return missing


def _print_table(report: Report) -> None:
    rates, hits, most = report["hit_rate_by_tier"], report["hits"], report["records_max"]
    print(f"{report['trace']}: {report['requests']} requests, {report['blocks']} blocks")
    print(f"{'':<10}{'records max':>12}{'hit blocks':>12}{'hit rate':>10}")
    for tier in ("memory", "disk"):
        if most[tier]:
            print(f"{tier:<10}{most[tier]:>12}{hits[tier]:>12}{rates[tier]:>10.4f}")
    print(f"{'all':<10}{'':>12}{sum(hits.values()):>12}{report['hit_rate']:>10.4f}")
    for reason, count in report["misses"].items():
        print(f"missed, {reason:<16}{count:>10}")
    for edge, size in report["bytes_by_edge"].items():
        print(f"moved, {edge.replace('_', ' '):<18}{format_size(size):>9}")
    if report["shed"]:
        print(f"shed: {report['shed']} blocks were offered and found no slot")
    rate = report["blocks"] / report["seconds"] if report["seconds"] else 0.0
    print(f"{report['seconds']:.1f} s, {rate:.0f} blocks/s")
    print(
        f"wrong bytes: {report['wrong_bytes']} in {report['wrong_records']} of "
        f"{report['compared_records']} records compared"
    )
    if report["disk_down"]:
        print(f"the disk tier went down, the hit rates are not its own: {report['disk_down']}")
    for what in report["not_exercised"]:
        print(f"not exercised: {what}")


# -- the verb -------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    tier_size = "a size, or an exact count like 3655records"
    parser.add_argument("trace", metavar="TRACE", help="kvtrace-1 or Mooncake JSONL, plain or .gz")
    parser.add_argument("--block-bytes", default="4KiB", metavar="SIZE", help="bytes of one record")
    parser.add_argument("--memory", default="256MiB", metavar="SIZE", help=tier_size)
    parser.add_argument("--disk", metavar="SIZE", help=f"{tier_size}; default: no disk tier")
    parser.add_argument("--dir", metavar="PATH", help="the disk tier's; default: a temporary one")
    parser.add_argument("--requests", type=int, metavar="N", help="stop after the first N requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Replay and report. 0, or 1 when a byte that was read back was wrong or the disk went down."""
    if args.requests is not None and args.requests < 1:
        raise ConfigError("--requests is less than 1", next_step="Give a positive number.")
    if args.dir is not None and args.disk is None:
        raise ConfigError("--dir without --disk", next_step="Say how large the disk tier may be.")
    report = asyncio.run(_replayed(args))
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 1 if report["wrong_bytes"] or report["disk_down"] else 0


async def _replayed(args: argparse.Namespace) -> Report:
    """The store is polled by this thread between reads of the trace; there is no other task."""
    header = await read_header(args.trace)
    record_bytes = parse_size(args.block_bytes)
    if not record_bytes:
        raise ConfigError("--block-bytes is nothing", next_step="Give a size, like 4KiB.")
    rig = Rig(
        parse_capacity(args.memory),
        parse_capacity(args.disk) if args.disk else None,
        record_bytes,
        directory=args.dir,
    )
    try:
        replay = Replay(rig)
        known = [count for count in (header.requests, args.requests) if count is not None]
        started = time.monotonic()
        with progress(min(known, default=None)) as advanced:
            async with aclosing(read_requests(args.trace, args.requests)) as requests:
                async for request in requests:
                    replay.request(request.block_ids)
                    advanced(replay.requests, replay.hit_rate)
        return report_of(replay, header.name, time.monotonic() - started, rig.records_max())
    finally:
        rig.close()
