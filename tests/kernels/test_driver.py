"""The binding of the CUDA driver against a stand-in that NVIDIA's header vouches for."""

from __future__ import annotations

import resource
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ebbtide.errors import MisuseError, TierUnavailableError
from ebbtide.kernels import driver as driver_module
from ebbtide.kernels.driver import Attributes, Driver, Order
from ebbtide.kernels.fragments import Copies
from ebbtide.kernels.registration import Registration
from ebbtide.kernels.streams import Event, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tests.kernels.conftest import StandIn

PAGE = 4096


def buffer(pages: int, fill: int = 0) -> NDArray[np.uint8]:
    """Whole pages at a page's address."""
    raw = np.full((pages + 1) * PAGE, fill, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + pages * PAGE]


def columns(
    target: NDArray[np.uint8], source: NDArray[np.uint8], pieces: list[tuple[int, int, int]]
) -> tuple[NDArray[np.int64], ...]:
    rows = np.array(pieces, dtype=np.int64)
    return (
        rows[:, 0] + target.ctypes.data,
        rows[:, 1] + source.ctypes.data,
        rows[:, 2].copy(),
    )


def test_the_attributes_lie_where_the_header_says(stand_in: StandIn) -> None:
    import ctypes

    fields = (Attributes.srcLocHint, Attributes.dstLocHint, Attributes.flags)
    assert stand_in.attributes() == (ctypes.sizeof(Attributes), *(one.offset for one in fields))


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("supported", [True, False])
def test_copies_arrive_when_the_stream_is_waited_for(
    stand_in: StandIn, batches: bool, supported: bool
) -> None:
    """With batches, without them in the driver, and on a device that refuses them."""
    driver = stand_in.driver(batches=batches, supported=supported)
    source, target = buffer(2, 7), buffer(2)
    stream = Stream(driver)
    pieces = [(0, 100, 50), (4000, 0, 200), (60, 5000, 1)]
    driver.copy(*columns(target, source, pieces), stream=stream.handle, order=Order.STREAM)
    assert not target.any()
    stream.synchronize()
    for to, _, length in pieces:
        assert (target[to : to + length] == 7).all()
    assert target.sum() == 7 * 251
    assert driver.batches is (batches and supported)
    if driver.batches:
        assert (stand_in.batches, stand_in.singles, stand_in.last_order) == (1, 0, Order.STREAM)
    else:
        assert (stand_in.batches, stand_in.singles) == (0, 3)
    stream.close()


def test_a_long_list_goes_in_several_calls(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "COPIES_PER_CALL_MAX", 4)
    driver = stand_in.driver()
    source, target, stream = buffer(1, 3), buffer(1), Stream(driver)
    pieces = [(2 * i, 2 * i, 1) for i in range(9)]
    driver.copy(*columns(target, source, pieces), stream=stream.handle, order=Order.ANY)
    stream.synchronize()
    assert (stand_in.batches, stand_in.copies, int(target.sum())) == (3, 9, 27)
    stream.close()


def test_what_a_stream_waits_for_comes_first(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    first, second, third = buffer(1, 5), buffer(1), buffer(1)
    compute, copies, event = Stream(driver), Stream(driver), Event(driver)
    driver.copy(*columns(second, first, [(0, 0, 64)]), stream=compute.handle, order=Order.STREAM)
    event.record(compute.handle)
    copies.wait(event)
    driver.copy(*columns(third, second, [(0, 0, 64)]), stream=copies.handle, order=Order.STREAM)
    copies.synchronize()
    assert (third[:64] == 5).all()
    for one in (compute, copies, event):
        one.close()


def test_a_missing_wait_reads_what_lay_there_before(stand_in: StandIn) -> None:
    """The fault that the test above would not see if the stand-in ran copies at once."""
    driver = stand_in.driver()
    first, second, third = buffer(1, 5), buffer(1, 1), buffer(1)
    compute, copies = Stream(driver), Stream(driver)
    driver.copy(*columns(second, first, [(0, 0, 64)]), stream=compute.handle, order=Order.STREAM)
    driver.copy(*columns(third, second, [(0, 0, 64)]), stream=copies.handle, order=Order.STREAM)
    copies.synchronize()
    assert (third[:64] == 1).all()
    for stream in (compute, copies):
        stream.close()


@pytest.mark.parametrize("stream", [0, 1])
def test_the_legacy_default_stream_is_refused(stand_in: StandIn, stream: int) -> None:
    driver = stand_in.driver()
    one = buffer(1)
    with pytest.raises(MisuseError, match="stream of their own"):
        driver.copy(*columns(one, one, [(0, 64, 8)]), stream=stream, order=Order.ANY)


def test_arrays_that_do_not_fit_are_refused(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    targets, sources, lengths = columns(buffer(1), buffer(1), [(0, 0, 8), (8, 8, 8)])
    for wrong in (
        (targets.astype(np.int32), sources, lengths),
        (targets[:1], sources, lengths),
        (targets, sources, lengths.astype(np.float64)),
    ):
        with pytest.raises(MisuseError, match="int64"):
            driver.copy(*wrong, stream=0x1001, order=Order.ANY)


def test_a_refused_copy_is_named(stand_in: StandIn) -> None:
    one = buffer(1)
    for batches, words in ((True, "failed=2"), (False, "cuMemcpyAsync")):
        driver = stand_in.driver(batches=batches, failing_copy=3)
        stream = Stream(driver)
        pieces = [(8 * i, 2048 + 8 * i, 8) for i in range(5)]
        with pytest.raises(TierUnavailableError, match=words):
            driver.copy(*columns(one, one, pieces), stream=stream.handle, order=Order.STREAM)
        stream.close()


def test_another_thread_has_to_take_the_context(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    one, stream = buffer(1, 2), Stream(driver)
    seen: list[str] = []

    def copy() -> None:
        for use in (False, True):
            if use:
                driver.use(0)
            try:
                driver.copy(
                    *columns(one, one, [(0, 64, 8)]), stream=stream.handle, order=Order.STREAM
                )
            except TierUnavailableError as error:
                seen.append(str(error))
            else:
                seen.append("copied")

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert "CUDA_ERROR_INVALID_CONTEXT" in seen[0]
    assert seen[1:] == ["copied"]
    stream.close()


def test_a_device_that_is_not_there_is_an_error(stand_in: StandIn) -> None:
    with pytest.raises(TierUnavailableError, match="cuDeviceGet"):
        stand_in.driver().use(1)


def test_no_driver_is_an_error_with_a_reason() -> None:
    with pytest.raises(TierUnavailableError, match="cannot be loaded"):
        Driver("libcuda-that-is-not-there.so.1")
    with pytest.raises(TierUnavailableError, match=r"too old.*cuInit"):
        Driver("libc.so.6")


def test_an_arena_is_registered_in_pieces_and_given_back(stand_in: StandIn) -> None:
    driver, arena = stand_in.driver(), buffer(7)
    registration = Registration(driver, arena.ctypes.data, arena.nbytes, piece_bytes=3 * PAGE)
    assert stand_in.registered == 7 * PAGE
    assert (registration.edges - arena.ctypes.data).tolist() == [3 * PAGE, 6 * PAGE]
    registration.close()
    registration.close()
    assert stand_in.registered == 0


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def test_p70_memory_that_may_not_be_locked_is_an_error_that_says_so(stand_in: StandIn) -> None:
    driver, arena = stand_in.driver(lockable_bytes=5 * PAGE), buffer(7)
    with pytest.raises(TierUnavailableError, match="ulimit -l unlimited") as caught:
        Registration(driver, arena.ctypes.data, arena.nbytes, piece_bytes=3 * PAGE)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
    assert "system RAM (it is not GPU memory" in str(caught.value)
    assert "memory.capacity" in caught.value.next_step
    assert caught.value.context["size_bytes"] == 3 * PAGE  # of the piece
    assert caught.value.context["memlock_limit"] in ("unlimited", soft_limit())
    assert stand_in.registered == 0  # the first piece was given back


def test_copies_are_cut_where_a_piece_ends(stand_in: StandIn) -> None:
    driver, arena, device = stand_in.driver(), buffer(6), buffer(6, 9)
    registration = Registration(driver, arena.ctypes.data, arena.nbytes, piece_bytes=2 * PAGE)
    records, blocks, lengths = columns(arena, device, [(PAGE, 0, 5 * PAGE), (0, 5 * PAGE, 64)])
    whole = Copies(blocks, records, lengths)
    stream = Stream(driver)
    with pytest.raises(TierUnavailableError, match="INVALID_VALUE"):  # as a real device does
        driver.copy(records, blocks, lengths, stream=stream.handle, order=Order.STREAM)
    cut = registration.cut(whole)
    assert sorted(cut.lengths.tolist()) == [64, PAGE, 2 * PAGE, 2 * PAGE]
    driver.copy(cut.records, cut.blocks, cut.lengths, stream=stream.handle, order=Order.STREAM)
    stream.synchronize()
    assert (arena[PAGE:] == 9).all()
    assert arena[:PAGE].sum() == 64 * 9
    touching = columns(arena, device, [(PAGE, 0, PAGE), (2 * PAGE, PAGE, 2 * PAGE)])
    assert len(registration.cut(Copies(touching[1], touching[0], touching[2])).lengths) == 2
    stream.close()
    registration.close()
