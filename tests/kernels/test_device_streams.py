"""Copies beside the compute stream: in the right order, over a registered arena, each way alone.

Here the blocks are host memory and the driver is the stand-in, whose streams run as late as they
may: a wait that is missing shows as wrong bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ebbtide.bench.paged_forms import FORMS, Pages, Shape, make_pages
from ebbtide.errors import ConfigError, MisuseError, TierUnavailableError
from ebbtide.kernels import methods as methods_module
from ebbtide.kernels.choice import Choice
from ebbtide.kernels.copy_engine import EngineCopies
from ebbtide.kernels.driver import Driver, Order
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layout import PagedLayout
from ebbtide.kernels.methods import choose_method, make_method
from ebbtide.kernels.streams import Event, Stream
from ebbtide.tiers.arena import Arena
from ebbtide.tiers.device import CopyEnd, device_copies
from ebbtide.tiers.device_streams import StreamCopies, stream_copies
from ebbtide.tiers.mapped_arenas import Device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernels.conftest import StandIn


SHAPE = Shape(layers=2, blocks=8, tokens=4, heads=2, dim=16)
HANG_S = 20.0
ENGINE = {0: Choice("engine", "engine")}


class Rig:
    """Blocks, a compute stream, and copies on the stand-in driver."""

    def __init__(
        self,
        stand_in: StandIn,
        driver: Driver,
        choices: dict[int, Choice] | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        self.stand_in, self.driver = stand_in, driver
        self.kept: list[torch.Tensor] = []  # what the compute stream may still touch
        self.pages: Pages = make_pages(FORMS["kv_first_nhd"], SHAPE, torch.float16)
        self.layout = PagedLayout.from_tensors(self.pages.tensors)
        self.size = self.layout.record_bytes
        self.compute = Stream(driver)
        device = Device(driver, 0, lambda: self.compute.handle)
        self.copies = StreamCopies({0: self.layout}, device, choices or ENGINE, by_layer=by_layer)

    def compute_copies(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Work of the compute stream: bytes of one tensor to another, when it comes to it."""
        self.kept += [target, source]
        columns = ([target.data_ptr()], [source.data_ptr()], [source.nbytes])
        self.driver.copy(
            *(np.array(column) for column in columns),
            stream=self.compute.handle,
            order=Order.STREAM,
        )

    def submit(self, arena: Arena, blocks: list[int], tag: str, *, up: bool = False) -> None:
        offsets = [block * self.size for block in blocks]
        self.copies.submit(tag, 0, blocks, offsets, to_device=up, arena=arena)

    def ends(self) -> list[CopyEnd]:
        found: list[CopyEnd] = []
        deadline = time.monotonic() + HANG_S
        while self.copies.open_jobs:
            assert time.monotonic() < deadline
            found += self.copies.poll()
        return found

    def record(self, arena: Arena, block: int) -> torch.Tensor:
        return torch.frombuffer(arena.view(block * self.size, self.size), dtype=torch.uint8).clone()

    def close(self) -> None:
        assert self.copies.close()
        self.compute.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(64 * 4096)
    yield arena
    arena.close()


@pytest.fixture
def rig(stand_in: StandIn, arena: Arena) -> Iterator[Rig]:
    """It ends before the arena does."""
    rig = Rig(stand_in, stand_in.driver())
    yield rig
    rig.close()


def check_store_after_compute(rig: Rig, arena: Arena) -> None:
    """A block that a step still computes when its copy is submitted."""
    fresh = torch.full_like(rig.pages.tensors[0][0, 3], 7.0)
    rig.compute_copies(rig.pages.tensors[0][0, 3], fresh)
    rig.submit(arena, [2, 3], "down")
    assert rig.ends() == [CopyEnd("down", False, None)]
    record = rig.record(arena, 3)
    assert torch.equal(record[: fresh.nbytes], fresh.view(-1).view(torch.uint8))


def check_load_after_compute(rig: Rig, arena: Arena) -> None:
    """A block that a step still reads for its former owner when it is loaded for the next."""
    block = rig.pages.tensors[1][1, 5]
    before, read = block.clone(), torch.zeros_like(block)
    rig.compute_copies(read, block)
    rig.submit(arena, [5], "up", up=True)
    assert rig.ends() == [CopyEnd("up", True, None)]
    rig.compute.synchronize()
    assert torch.equal(read.view(torch.uint8), before.view(torch.uint8))
    assert not block.view(torch.uint8).any()  # the arena was empty


def test_a_store_waits_for_the_work_that_writes_its_blocks(rig: Rig, arena: Arena) -> None:
    check_store_after_compute(rig, arena)


def test_a_load_waits_for_the_work_that_reads_its_blocks(rig: Rig, arena: Arena) -> None:
    check_load_after_compute(rig, arena)


@pytest.mark.parametrize("check", [check_store_after_compute, check_load_after_compute])
def test_planted_a_missing_wait_is_seen(
    check: type, rig: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "wait", lambda stream, event: None)
    with pytest.raises(AssertionError):
        check(rig, arena)


def test_planted_an_end_before_the_stream_has_ended_is_seen(
    rig: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "synchronize", lambda stream: None)
    with pytest.raises(AssertionError):
        check_store_after_compute(rig, arena)


@pytest.mark.parametrize("method", ["engine", "torch"])
def test_what_went_down_comes_back(method: str, stand_in: StandIn, arena: Arena) -> None:
    rig = Rig(stand_in, stand_in.driver(), {0: Choice(method, method)})
    records = [rig.pages.record(block) for block in range(SHAPE.blocks)]
    rig.submit(arena, [1, 2, 7, 5], "down")
    assert rig.ends() == [CopyEnd("down", False, None)]
    for tensor in rig.pages.tensors:
        tensor.zero_()
    rig.submit(arena, [7, 1], "up", up=True)
    assert rig.ends() == [CopyEnd("up", True, None)]
    for block in range(SHAPE.blocks):
        back = rig.pages.record(block)
        assert torch.equal(back, records[block]) if block in (1, 7) else not back.any()
    assert (stand_in.copies > 0) is (method == "engine")
    rig.close()


# -- layer by layer -------------------------------------------------------------------------------


@pytest.fixture
def layered(stand_in: StandIn, arena: Arena) -> Iterator[Rig]:
    rig = Rig(stand_in, stand_in.driver(), by_layer=True)
    yield rig
    rig.close()


def check_compute_behind_each_layer(
    rig: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The compute stream reads each layer of a block that is loaded, as a forward pass does.

    The load's own thread does not look at the stream before all of that was read. Returns what was
    done, in turn.
    """
    block, log = 5, []
    expected = [tensor[:, block].clone() for tensor in rig.pages.tensors]
    rig.submit(arena, [block], "down")
    rig.ends()
    for tensor in rig.pages.tensors:
        tensor[:, block].zero_()
    read, synchronize = threading.Event(), Stream.synchronize

    def later(stream: Stream) -> None:
        if stream is not rig.compute:
            assert read.wait(HANG_S)
        synchronize(stream)

    monkeypatch.setattr(Stream, "synchronize", later)
    rig.submit(arena, [block], "up", up=True)
    found = [torch.zeros_like(tensor) for tensor in expected]
    for layer, tensor in enumerate(rig.pages.tensors):
        rig.copies.wait_for_layer("up", 0, layer)
        for half in range(2):
            rig.compute_copies(found[layer][half], tensor[half, block])
        before = [bool(one[:, block].any()) for one in rig.pages.tensors]
        rig.compute.synchronize()
        after = [bool(one[:, block].any()) for one in rig.pages.tensors]
        log.append(f"{before} {after}")
    read.set()
    assert rig.ends() == [CopyEnd("up", True, None)]
    for got, right in zip(found, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))
    return log


def test_a_layer_is_read_before_the_next_has_come(
    layered: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device as lazy as may be, a layer comes when the compute stream needs it."""
    log = check_compute_behind_each_layer(layered, arena, monkeypatch)
    assert log == ["[False, False] [True, False]", "[True, False] [True, True]"]


def test_layers_wait_for_the_work_that_reads_their_blocks(layered: Rig, arena: Arena) -> None:
    check_load_after_compute(layered, arena)


def test_planted_a_pass_that_does_not_wait_for_a_layer_is_seen(
    layered: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "hold_back", lambda event, stream: None)
    with pytest.raises(AssertionError):
        check_compute_behind_each_layer(layered, arena, monkeypatch)


def test_planted_a_mark_that_stands_for_nothing_is_seen(
    layered: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that was not recorded behind its layer holds nobody up."""
    monkeypatch.setattr(Event, "record", lambda event, stream: None)
    with pytest.raises(AssertionError):
        check_compute_behind_each_layer(layered, arena, monkeypatch)


@pytest.mark.parametrize("method", ["engine", "torch"])
def test_layers_of_a_load_are_the_whole_block(method: str, stand_in: StandIn, arena: Arena) -> None:
    rig = Rig(stand_in, stand_in.driver(), {0: Choice(method, method)}, by_layer=True)
    records = [rig.pages.record(block) for block in range(SHAPE.blocks)]
    rig.submit(arena, [1, 2, 7, 5], "down")
    rig.ends()
    for tensor in rig.pages.tensors:
        tensor.zero_()
    rig.submit(arena, [7, 1], "up", up=True)
    assert rig.ends() == [CopyEnd("up", True, None)]
    for block in range(SHAPE.blocks):
        back = rig.pages.record(block)
        assert torch.equal(back, records[block]) if block in (1, 7) else not back.any()
    rig.copies.wait_for_layer("up", 0, 0)  # it is over: nobody waits
    rig.copies.wait_for_end("up")
    rig.close()


@pytest.mark.parametrize("refused", [1, 2])
def test_who_waits_for_a_layer_that_fails_goes_on(
    refused: int, stand_in: StandIn, arena: Arena
) -> None:
    rig = Rig(stand_in, stand_in.driver(failing_copy=2 * refused), by_layer=True)
    rig.submit(arena, [1], "up", up=True)  # two copies a layer
    for layer in range(2):
        rig.copies.wait_for_layer("up", 0, layer)
    rig.copies.wait_for_end("up")
    (end,) = rig.copies.poll()
    assert isinstance(end.error, TierUnavailableError)
    rig.close()


def test_methods_of_layers_share_one_staging_buffer(stand_in: StandIn, arena: Arena) -> None:
    pytest.importorskip("triton", reason="NO TRITON: kernels are not tested")
    rig = Rig(stand_in, stand_in.driver(), {0: Choice("kernel", "kernel")}, by_layer=True)
    rig.submit(arena, [1], "up", up=True)
    rig.ends()
    made = rig.copies._loads._methods
    assert len(made) == SHAPE.layers
    assert len({method.staging.data_ptr() for method in made.values()}) == 1  # type: ignore[union-attr]  # kernels have one
    rig.close()


def test_a_store_under_way_holds_no_load_up(
    rig: Rig, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, may_go, begun = EngineCopies.gather, threading.Event(), threading.Event()

    def slow(*arguments: object, **named: object) -> None:
        begun.set()
        assert may_go.wait(HANG_S)
        gather(*arguments, **named)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(EngineCopies, "gather", slow)
    rig.submit(arena, [1], "down")
    assert begun.wait(HANG_S)
    rig.submit(arena, [2], "up", up=True)
    deadline = time.monotonic() + HANG_S
    while not (ends := rig.copies.poll()):
        assert time.monotonic() < deadline
    assert ends == [CopyEnd("up", True, None)]
    may_go.set()
    rig.copies.settle_stores()
    assert rig.copies.poll() == [CopyEnd("down", False, None)]


def test_an_arena_is_registered_once_and_given_back(stand_in: StandIn, arena: Arena) -> None:
    rig = Rig(stand_in, stand_in.driver())
    for number in range(3):
        rig.submit(arena, [number], "down")
        rig.submit(arena, [number + 4], "up", up=True)
    rig.ends()
    assert stand_in.registered == 64 * 4096
    assert rig.copies.pinned is True
    rig.close()
    assert stand_in.registered == 0


def test_another_arena_takes_the_place_of_the_first(rig: Rig, arena: Arena) -> None:
    """A store that was restarted: the old arena goes when its last copy has ended."""
    other = Arena.create(32 * 4096)
    rig.submit(arena, [1], "old")
    rig.ends()
    rig.submit(other, [2], "new")
    rig.ends()
    assert rig.stand_in.registered == 32 * 4096
    assert torch.equal(rig.record(other, 2), rig.pages.record(2))
    other.close()


def test_p70_memory_that_may_not_be_locked_costs_time_alone(
    stand_in: StandIn, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(stand_in, stand_in.driver(lockable_bytes=4096))
    with caplog.at_level(logging.WARNING):
        rig.submit(arena, [1, 2], "down")
        assert rig.ends() == [CopyEnd("down", False, None)]
        rig.submit(arena, [3], "down")
        rig.ends()
    (line,) = caplog.messages
    for words in ("memory.capacity is 256KiB", "pinned=false", "system RAM", "ulimit -l unlimited"):
        assert words in line
    assert stand_in.registered == 0
    assert rig.copies.pinned is False
    assert torch.equal(rig.record(arena, 2), rig.pages.record(2))
    right = rig.pages.record(2)
    rig.submit(arena, [2], "up", up=True)
    assert rig.ends() == [CopyEnd("up", True, None)]
    assert torch.equal(rig.pages.record(2), right)
    assert stand_in.copies == 0
    rig.close()


def test_a_copy_that_the_driver_refuses_ends_with_its_error(
    stand_in: StandIn, arena: Arena
) -> None:
    rig = Rig(stand_in, stand_in.driver(failing_copy=2))
    rig.submit(arena, [1], "refused")
    rig.submit(arena, [2], "next")
    first, second = rig.ends()
    assert (first.tag, type(first.error)) == ("refused", TierUnavailableError)
    assert second == CopyEnd("next", False, None)
    assert torch.equal(rig.record(arena, 2), rig.pages.record(2))
    rig.close()


def test_blocks_that_were_allocated_anew_are_not_copied(rig: Rig, arena: Arena) -> None:
    storage = rig.pages.tensors[1].untyped_storage()
    storage.resize_(64 * storage.nbytes())
    rig.submit(arena, [1], "down")
    (end,) = rig.ends()
    assert isinstance(end.error, MisuseError)
    assert rig.stand_in.copies == 0


def test_a_method_that_is_lost_later_is_replaced(
    stand_in: StandIn,
    arena: Arena,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Staging memory that was there when it was measured may be gone when it is needed."""

    def make(
        name: str, driver: Driver, table: FragmentTable, staging: torch.Tensor | None = None
    ) -> methods_module.Method:
        if name == "kernel":
            raise TierUnavailableError("No device memory is left for staging")
        return make_method(name, driver, table, staging)

    monkeypatch.setattr(methods_module, "make_method", make)
    rig = Rig(stand_in, stand_in.driver(), {0: Choice("kernel", "kernel")})
    rig.submit(arena, [4], "down")
    assert rig.ends() == [CopyEnd("down", False, None)]
    assert torch.equal(rig.record(arena, 4), rig.pages.record(4))
    assert "No device memory" in caplog.text
    rig.close()


def test_the_choice_is_measured_with_blocks_that_stay_as_they_are(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    pages = make_pages(FORMS["kv_first_nhd"], SHAPE, torch.float16)
    before = [pages.record(block) for block in range(SHAPE.blocks)]
    table = FragmentTable.of(PagedLayout.from_tensors(pages.tensors))
    assert choose_method("engine", driver, table) == Choice("engine", "engine")
    assert stand_in.copies > 0
    assert choose_method("torch", driver, table) == Choice("torch", "torch")
    for block, record in enumerate(before):
        assert torch.equal(pages.record(block), record)


def test_a_clock_decides_what_auto_takes(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each method is as fast as the clock says: here every look at it takes one second less."""
    driver = stand_in.driver()
    monkeypatch.setattr(methods_module, "METHODS", ("engine", "torch"))
    table = FragmentTable.of(
        PagedLayout.from_tensors(
            make_pages(FORMS["mla"], SHAPE, torch.float16).tensors, block_dim=0
        )
    )
    seconds = iter(2.0**-number for number in range(100))
    clock = {"now": 0.0}

    def later() -> float:
        clock["now"] += next(seconds)
        return clock["now"]

    assert choose_method("auto", driver, table, now=later) == Choice("torch", "torch")


def test_a_refusing_driver_leaves_torch(stand_in: StandIn) -> None:
    driver = stand_in.driver(failing_copy=1)
    table = FragmentTable.of(
        PagedLayout.from_tensors(
            make_pages(FORMS["mla"], SHAPE, torch.float16).tensors, block_dim=0
        )
    )
    with pytest.raises(ConfigError, match="refused a batch"):
        choose_method("engine", driver, table)


def test_a_device_is_found_and_its_method_chosen(
    stand_in: StandIn, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `device_copies` does on a GPU, up to torch's own calls."""
    driver = stand_in.driver()
    compute = Stream(driver)
    monkeypatch.setattr("ebbtide.kernels.driver.Driver", lambda: driver)
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=compute.handle)
    )
    pages = make_pages(FORMS["mla"], SHAPE, torch.float16)
    layout = PagedLayout.from_tensors(pages.tensors, block_dim=0)
    copies = stream_copies({3: layout}, "engine")
    assert waited == [layout.device]
    before = stand_in.copies
    copies.submit("down", 3, [5], [0], to_device=False, arena=arena)
    copies.settle_stores()
    assert copies.poll() == [CopyEnd("down", False, None)]
    assert stand_in.copies > before > 0  # it was measured, and then used
    got = torch.frombuffer(arena.view(0, layout.record_bytes), dtype=torch.uint8)
    assert torch.equal(got, pages.record(5))
    del got
    assert copies.close()
    compute.close()


def test_a_device_without_a_driver_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.kernels.driver.Driver", lambda: Driver("no-such-libcuda.so"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    layout = PagedLayout.from_tensors([torch.zeros(2, 7, 4, 3, 8)])
    with pytest.raises(ConfigError, match="cannot be copied"):
        stream_copies({0: layout}, "auto")


def test_host_memory_has_no_copy_engine() -> None:
    layout = PagedLayout.from_tensors([torch.zeros(2, 7, 4, 3, 8)])
    for method in ("auto", "torch"):
        assert device_copies({0: layout}, method).close()
    with pytest.raises(ConfigError, match="host memory"):
        device_copies({0: layout}, "engine")
