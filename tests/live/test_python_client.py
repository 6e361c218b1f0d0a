"""`ebbtide.Client` and `ebbtide.AsyncClient` on real stores: what the document says, and more."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import PATIENCE_S, eventually

import ebbtide
from ebbtide.connectors import protocol as wire
from ebbtide.errors import ConfigError, MisuseError, TierUnavailableError

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    example
    for document in ("docs/python.md", "README.md")
    for example in re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
]
PAGE = 4096


def name_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def bytes_in_use(house: House, name: str) -> int:
    found: int = house.stats()["memory"][name]
    return found


@pytest.mark.parametrize("number", range(3))
def test_the_lines_of_the_document_run_as_they_stand_and_without_torch(
    house: House, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(EXAMPLES) == 3
    assert len([line for line in EXAMPLES[number].splitlines() if line]) <= 10
    house.start()
    monkeypatch.setenv("EBBTIDE_SOCKET", house.socket)
    code = EXAMPLES[number] + "\nimport sys; print({'torch', 'vllm'} & sys.modules.keys())\n"
    ended = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("set()\n", "")


def test_records_of_two_namespaces_and_groups_are_apart(house: House) -> None:
    house.start(disk=True)
    with ebbtide.Client(house.socket) as client:
        one, two = client.namespace(model="one"), client.namespace(model="two")
        assert one.put(name_of(1), b"a" * 100)
        assert one.put(name_of(1), b"b" * 100, group=1)
        assert two.put(name_of(1), b"c" * 100)
        assert one.get(name_of(1)) == b"a" * 100
        assert one.get(name_of(1), group=1) == b"b" * 100
        assert two.get(name_of(1)) == b"c" * 100
        assert two.get(name_of(1), group=1) is None
        assert one.put(name_of(1), b"d" * 100)  # it is held: a record never changes
        assert one.get(name_of(1)) == b"a" * 100


@pytest.mark.parametrize("protocol", [(1, 2), wire.VERSION])
def test_bytes_that_changed_since_they_were_put_are_a_miss(
    house: House, protocol: tuple[int, int]
) -> None:
    """Whoever verifies: this client, or a store that is older than it."""
    house.start()
    with ebbtide.Client(house.socket) as client:
        client.link.protocol = protocol
        sent: list[type[wire.Message]] = []
        submit = client.link.submit

        def watched(message: wire.Message) -> int:
            sent.append(type(message))
            return submit(message)

        client.link.submit = watched  # type: ignore[method-assign]
        space = client.namespace(model="m")
        records = {name_of(number): os.urandom(PAGE + 5) for number in range(3)}
        assert space.put_many(records) == 3
        assert space.get_many(records) == records
        arena = client.link.arena
        assert arena is not None
        spoilt = records[name_of(1)]
        arena.view(bytes(arena.buffer).index(spoilt) + 4000, 1)[0] ^= 1
        assert space.get_many(records) == {n: b for n, b in records.items() if b is not spoilt}
        eventually(lambda: house.stats()["counts"]["memory_corrupt"] == 1)
        assert space.put(name_of(1), spoilt)
        assert space.get(name_of(1)) == spoilt
    new = {wire.CommitDigests, wire.LoadToVerify}
    old = {wire.Commit, wire.LoadKeys}
    assert new | old & {*sent} == new if protocol == wire.VERSION else not new & {*sent}


def test_more_than_a_window_of_records_comes_in_one_call(house: House) -> None:
    house.start(memory="16MiB")  # a window of 4 MiB
    records = {name_of(number): bytes([number]) * (256 << 10) for number in range(40)}
    with ebbtide.Client(house.socket) as client:
        space = client.namespace(model="m")
        assert space.put_many(records) == 40
        found = space.get_many([*records, name_of(99)])
        assert found == records
        assert space.get_many([]) == {}
        assert space.put_many({}) == 0
    eventually(lambda: bytes_in_use(house, "pinned_bytes") == 0)


async def test_calls_run_at_the_same_time_and_the_loop_is_never_blocked(house: House) -> None:
    store = house.start()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async with ebbtide.AsyncClient(house.socket) as client:
        space = client.namespace(model="m")
        names = [name_of(number) for number in range(50)]
        assert all(await asyncio.gather(*(space.put(name, name * 128) for name in names)))
        found = await asyncio.gather(*(space.get(name) for name in names))
        assert found == [name * 128 for name in names]
        store.send_signal(signal.SIGSTOP)
        ticking = asyncio.create_task(tick())
        waiting = asyncio.create_task(space.get(names[0]))
        newcomer = ebbtide.AsyncClient(house.socket)
        arriving = asyncio.create_task(newcomer.connect())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert not arriving.done()
        assert ticks > 20
        store.send_signal(signal.SIGCONT)
        assert await waiting == names[0] * 128
        await arriving
        await newcomer.close()
        ticking.cancel()


def test_a_store_that_went_away_is_a_time_of_misses_and_the_next_one_is_found(
    house: House,
) -> None:
    store = house.start(disk=True)
    with ebbtide.Client(house.socket) as client:
        space = client.namespace(model="m")
        assert space.put(name_of(1), b"x" * PAGE)
        store.terminate()
        assert store.wait(PATIENCE_S) == 0
        assert space.get(name_of(1)) is None
        assert not space.put(name_of(2), b"y" * PAGE)
        house.start(disk=True)
        eventually(lambda: space.get(name_of(1)) == b"x" * PAGE)  # with its new handle and arena
        assert space.put(name_of(2), b"y" * PAGE)


async def test_the_asynchronous_client_finds_the_next_store_too(house: House) -> None:
    store = house.start(disk=True)
    async with ebbtide.AsyncClient(house.socket) as client:
        space = client.namespace(model="m")
        assert await space.put(name_of(1), b"x" * PAGE)
        store.terminate()
        await asyncio.to_thread(store.wait, PATIENCE_S)
        assert await space.get(name_of(1)) is None
        await asyncio.to_thread(house.start, disk=True)
        deadline = time.monotonic() + PATIENCE_S
        while await space.get(name_of(1)) != b"x" * PAGE:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
async def test_what_a_call_that_was_given_up_got_is_given_back(house: House, kind: str) -> None:
    store = house.start()
    with ebbtide.Client(house.socket) as writer:
        assert writer.namespace(model="m").put(name_of(1), b"x" * PAGE)

    def stop_for(seconds: float) -> threading.Timer:
        store.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, store.send_signal, [signal.SIGCONT])
        timer.start()
        return timer

    if kind == "plain":
        client = ebbtide.Client(house.socket, timeout_s=0.2)
        space = client.namespace(model="m")
        assert space.get(name_of(1)) == b"x" * PAGE
        timer = stop_for(0.6)
        assert space.get(name_of(1)) is None
        assert not space.put(name_of(2), b"y" * PAGE)
        timer.join()
        client.close()
    else:
        async with ebbtide.AsyncClient(house.socket, timeout_s=0.2) as other:
            apart = other.namespace(model="m")
            assert await apart.get(name_of(1)) == b"x" * PAGE
            timer = stop_for(0.6)
            assert await apart.get(name_of(1)) is None
            assert not await apart.put(name_of(2), b"y" * PAGE)
            timer.join()
    eventually(lambda: bytes_in_use(house, "pinned_bytes") == 0)
    assert bytes_in_use(house, "reserved_bytes") == 0


def test_clients_that_come_and_go_in_one_process_leave_the_store_nothing(house: House) -> None:
    store = house.start()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{store.pid}/fd"))

    with ebbtide.Client(house.socket) as first:
        assert first.namespace(model="m").put(name_of(1), b"x")
        before = descriptors()
        for _ in range(20):
            with ebbtide.Client(house.socket) as client:
                assert client.namespace(model="m").get(name_of(1)) == b"x"
        eventually(lambda: descriptors() == before)


def test_what_the_caller_does_wrong_is_raised(house: House) -> None:
    with pytest.raises(TierUnavailableError):
        ebbtide.Client(house.socket)
    house.start()
    with ebbtide.Client(house.socket) as client:
        space = client.namespace(model="m")
        for name in (b"", b"short", "a" * 32, bytes(36)):
            with pytest.raises(MisuseError, match="32 or 16 bytes"):
                space.put(name, b"x")  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="one size"):
            space.put_many({name_of(1): b"x", name_of(2): b"xx"})
        with pytest.raises(MisuseError, match="one size"):
            space.put(name_of(1), b"")
        with pytest.raises(MisuseError, match="needs a field"):
            client.namespace()
        with pytest.raises(MisuseError, match="property of the process"):
            client.namespace(port=80).get(name_of(1))
        with pytest.raises(ConfigError, match="does not fit"):
            space.put(name_of(1), bytes(8 << 20))
        assert space.put(name_of(1), b"x")  # and all is well


def test_the_package_offers_them_without_reading_them() -> None:
    program = (
        "import sys, ebbtide\n"
        "print([name for name in sys.modules if name.startswith('ebbtide.')])\n"
        "ebbtide.Client, ebbtide.AsyncClient\n"
        "print({'torch', 'uvicorn', 'starlette', 'prometheus_client'} & sys.modules.keys())\n"
    )
    command = [sys.executable, "-P", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\nset()\n"
    with pytest.raises(AttributeError):
        ebbtide.Cliend  # noqa: B018  # the attribute is the test
