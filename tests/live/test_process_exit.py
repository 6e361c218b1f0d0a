"""Programs that end without a word to their store: they end, at once, and say nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.live.conftest import eventually

from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import ask
from ebbtide.connectors.endpoint import answers

if TYPE_CHECKING:
    from tests.live.conftest import House

pytestmark = pytest.mark.live

RECORDS = 500
GRACE_S = 3.0
START_S = 7.0  # of Python and of a store, on a busy machine
IMPORTS = "import asyncio, hashlib, json, os, sys, ebbtide\n"
PLAIN = """
client = ebbtide.Client(sys.argv[1])
space = client.namespace(model="m")
names = [hashlib.sha256(b"%d" % n).digest() for n in range(500)]
assert space.put_many({name: b"x" * 4096 for name in names}) == 500
"""
ASYNC = """
async def main():
    global kept
    kept = ebbtide.AsyncClient(sys.argv[1])
    space = (await kept.__aenter__()).namespace(model="m")
    assert await space.put(bytes(32), b"x")

asyncio.run(main())
"""
CLOSED_TWICE = (
    PLAIN
    + """
client.close()
client.close()
class Owner:
    def __del__(self):
        client.close()
owner = Owner()
del owner
at_the_end = Owner()
"""
)
# What a half in an engine is made of, with stores that nobody has answered yet.
ENGINE = """
from ebbtide.connectors import protocol as wire
from ebbtide.connectors.client import SocketClient, ask
from ebbtide.connectors.process import ensure_store
from ebbtide.connectors.store_keeper import StoreKeeper

settings = json.loads(sys.argv[2])
keeper = StoreKeeper(ensure_store(settings), settings)
half = SocketClient(settings["socket"], os.urandom(16), "worker", arena=True)
space = ask(half, wire.OpenNamespace([["model", "m"]])).namespace
for n in range(500):
    half.submit(wire.Reserve(space, 4096, (hashlib.sha256(b"%d" % n).digest() + bytes(4),)))
"""


def run(program: str, house: House) -> None:
    """It ends in time, well and without a complaint."""
    words = [house.socket, json.dumps(house.settings(disk=True))]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS + program + "\nprint('end')\n", *words],
        capture_output=True,
        text=True,
        timeout=GRACE_S + START_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("program", [PLAIN, CLOSED_TWICE, ASYNC], ids=["plain", "twice", "async"])
def test_p78_a_program_that_does_not_close_or_closes_twice_ends_well(
    house: House, program: str
) -> None:
    house.start()
    run(program, house)
    report = ask(house.client(), wire.Stats())
    assert isinstance(report, wire.Report)
    assert report.report["memory"]["reserved_bytes"] == 0
    assert report.report["memory"]["records"] == (1 if program == ASYNC else RECORDS)


def test_p78_an_engine_that_just_ends_leaves_a_store_that_drains_and_ends(house: House) -> None:
    run(ENGINE, house)
    eventually(lambda: not answers(house.socket), GRACE_S)
    house.start(disk=True)  # the directory is free again
    assert house.client().connected
