"""Stages of `ebbtide bench device`: a shared arena, exactness, ceilings, copies, interference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import torch

from ebbtide.bench.device_rig import MIB, DeviceRig, shuffled, table_of
from ebbtide.bench.paged_forms import FORMS, Shape, make_pages, shape_of
from ebbtide.kernels.arena_records import ArenaRecords
from ebbtide.kernels.registration import Registration
from ebbtide.tiers.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

PEER = "ebbtide.bench.device_peer"
PEER_START_TIMEOUT_S = 60.0
QUIET_S = 0.3
FRAGMENTS = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 2 << 20)


def first_minute(rig: DeviceRig) -> None:
    """What the design stands on: a memfd that two processes register, and one of them dies."""
    arena = Arena.create(rig.pick(4, 256) * MIB)
    registration = None
    try:
        whole = torch.frombuffer(memoryview(arena.buffer), dtype=torch.uint8)
        started = time.perf_counter()
        if not rig.dry:
            registration = Registration(rig.queue, whole.data_ptr(), whole.numel())
        rig.row(
            "memfd.registered",
            mib=whole.numel() // MIB,
            huge_pages=arena.huge_pages,
            seconds=time.perf_counter() - started,
        )
        _kill_a_peer(rig, arena)
        first = bytes(whole[: 4 * MIB].numpy())
        time.sleep(QUIET_S)
        quiet = first == bytes(whole[: 4 * MIB].numpy())
        rig.row("peer.killed", ok=quiet and any(first), arena_quiet=quiet, arena_used=any(first))
        pages = make_pages(
            FORMS["kv_first_nhd"], Shape(4, 32, 16, 4, 64), torch.bfloat16, device=rig.device.type
        )
        table, ids = table_of(pages), shuffled(32, 8)
        offsets = [number * table.record_bytes for number in range(8)]
        for name, method in rig.methods(table).items():
            whole.zero_()
            method.gather(ArenaRecords(ids, whole, offsets, registration), stream=rig.stream)
            rig.synchronize()
            exact = all(
                torch.equal(whole[offset:][: table.record_bytes], pages.record(block))
                for block, offset in zip(ids, offsets, strict=True)
            )
            rig.row("copy.after_kill", ok=exact, method=name, exact=exact)
    finally:
        rig.synchronize()
        if registration is not None:
            registration.close()
        arena.close()


def _kill_a_peer(rig: DeviceRig, arena: Arena) -> None:
    """Another process copies into the arena, and is killed in the middle of it."""
    command = [sys.executable, "-m", PEER, str(arena.fd), rig.device.type]
    with subprocess.Popen(command, pass_fds=[arena.fd], stdout=subprocess.PIPE) as peer:
        try:
            os.set_blocking(peer.stdout.fileno(), False)  # type: ignore[union-attr]  # a pipe
            deadline = time.monotonic() + PEER_START_TIMEOUT_S
            said = b""
            while b"copying" not in said and peer.poll() is None:
                if time.monotonic() > deadline:
                    break
                said += peer.stdout.read() or b""  # type: ignore[union-attr]  # a pipe
                time.sleep(0.01)
            time.sleep(rig.pick(0.05, 0.5))
            copying = b"copying" in said and peer.poll() is None
        finally:
            peer.send_signal(signal.SIGKILL)
            peer.wait()
    rig.row("peer.copied", ok=copying, copying=copying)


def exactness(rig: DeviceRig) -> None:
    """Every form of paged memory, down and up again by every method, bit by bit."""
    shape = rig.pick(Shape(2, 5, 4, 2, 16), Shape(8, 300, 16, 8, 128))
    count = rig.pick(2, 200)
    for name, form in FORMS.items():
        pages, back = (
            make_pages(form, shape, torch.bfloat16, device=rig.device.type, seed=seed)
            for seed in (1, 2)
        )
        table, other = table_of(pages), table_of(back)
        ids, to = shuffled(shape.blocks, count), shuffled(shape.blocks, count, seed=9)
        offsets = [number * table.record_bytes for number in range(count)]
        expected = [pages.record(block) for block in ids[:20]]
        ups = rig.methods(other)
        for method_name, method in rig.methods(table).items():
            arena = rig.pinned(count * table.record_bytes)
            for tensor in back.buffers:
                tensor.zero_()
            method.gather(ArenaRecords(ids, arena, offsets), stream=rig.stream)
            ups[method_name].scatter(ArenaRecords(to, arena, offsets), stream=rig.stream)
            rig.synchronize()
            exact = all(
                torch.equal(record, back.record(block))
                and torch.equal(record, arena[offset:][: table.record_bytes])
                for record, block, offset in zip(expected, to, offsets, strict=False)
            )
            rig.row("exact", ok=exact, form=name, method=method_name, fragments=len(table))


def ceilings(rig: DeviceRig) -> None:
    """What the memory and the bus can do: plain copies of torch."""
    count = rig.pick(4, 1024) * MIB
    on_device = torch.zeros(count, dtype=torch.uint8, device=rig.device)
    other, host = torch.zeros_like(on_device), rig.pinned(count)
    works: dict[str, Callable[[], object]] = {
        "device": lambda: other.copy_(on_device),
        "up": lambda: on_device.copy_(host, non_blocking=True),
        "down": lambda: host.copy_(on_device, non_blocking=True),
    }
    for name, work in works.items():
        speed = count / rig.milliseconds(work) / 1e6
        # Copies inside the device read and write its memory.
        rig.figures[name] = 2 * speed if name == "device" else speed
        rig.row(f"ceiling.{name}", gb_s=rig.figures[name])
    if rig.dry:
        return
    second = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
    other_host = rig.pinned(count)

    def both() -> None:
        on_device.copy_(host, non_blocking=True)
        with torch.cuda.stream(second):
            other_host.copy_(other, non_blocking=True)

    rig.figures["both"] = 2 * count / rig.wall_ms(both) / 1e6
    rig.row("ceiling.both", gb_s=rig.figures["both"])


def copies(rig: DeviceRig) -> None:
    """By method and length of a fragment, as a share of the bus's own speed."""
    total = rig.pick(MIB // 4, 256 * MIB)
    for fragment in rig.pick(FRAGMENTS[:2], FRAGMENTS):
        if rig.left_s < 0.35 * rig.budget_s:
            rig.row("copies.stopped", left_s=rig.left_s)
            return
        form = FORMS["packed_lbnhc"]
        layers = max(2, min(32, total // fragment // 8))
        shape = shape_of(
            form, layers=layers, fragment_bytes=fragment, total_bytes=total + total // 4
        )
        pages = make_pages(form, shape, torch.bfloat16, device=rig.device.type)
        table = table_of(pages)
        count = max(1, total // table.record_bytes)
        ids = shuffled(shape.blocks, count)
        offsets = [number * table.record_bytes for number in range(count)]
        arena = rig.pinned(count * table.record_bytes)
        for name, method in rig.methods(table).items():
            for way, move in (("down", method.gather), ("up", method.scatter)):
                submit_ms: list[float] = []

                def work(move: Callable[..., None] = move, spent: list[float] = submit_ms) -> None:
                    started = time.perf_counter()
                    move(ArenaRecords(ids, arena, offsets), stream=rig.stream)  # noqa: B023  # run in this turn
                    spent.append((time.perf_counter() - started) * 1e3)

                speed = arena.numel() / rig.wall_ms(work) / 1e6
                rig.row(
                    f"copy.{way}",
                    method=name,
                    fragment=int(table.length[0]),
                    copies=count * len(table),
                    gb_s=speed,
                    of_ceiling=speed / rig.figures.get(way, speed),
                    submit_ms=min(submit_ms),
                )


def interference(rig: DeviceRig) -> None:
    """What a matrix product loses while each method copies beside it."""
    size = rig.pick(128, 8192)
    left = torch.ones(size, size, dtype=torch.bfloat16, device=rig.device)
    right, out = torch.ones_like(left), torch.empty_like(left)

    def products() -> None:
        for _ in range(rig.pick(1, 40)):
            torch.mm(left, right, out=out)

    alone = rig.wall_ms(products)
    form, total = FORMS["packed_lbnhc"], rig.pick(1, 256) * MIB
    shape = shape_of(form, layers=16, fragment_bytes=rig.pick(4096, 32768), total_bytes=total)
    pages = make_pages(form, shape, torch.bfloat16, device=rig.device.type)
    table = table_of(pages)
    ids = shuffled(shape.blocks, shape.blocks)
    offsets = [number * table.record_bytes for number in range(shape.blocks)]
    arena = rig.pinned(shape.blocks * table.record_bytes)
    for name, method in rig.methods(table).items():
        for way, move in (("down", method.gather), ("up", method.scatter)):
            rig.synchronize()
            beside = _beside(rig, products, move, ArenaRecords(ids, arena, offsets))
            rig.row("interference", method=name, way=way, alone_ms=alone, beside_ms=beside)


def _beside(
    rig: DeviceRig,
    products: Callable[[], None],
    move: Callable[..., None],
    records: ArenaRecords,
) -> float:
    """Milliseconds of the products while copies run on the rig's stream."""
    if rig.dry:
        move(records, stream=rig.stream)
        return rig.wall_ms(products)
    compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch
    with torch.cuda.stream(compute):
        marks[0].record()
        products()
        marks[1].record()
    while not marks[1].query():  # type: ignore[no-untyped-call]  # torch
        move(records, stream=rig.stream)
        torch.cuda.current_stream().synchronize()
    rig.synchronize()
    return float(marks[0].elapsed_time(marks[1]))
