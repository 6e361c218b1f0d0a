"""A disk tier whose machine lost its power, at any moment of a recorded life.

A state after the cut has all that a completed sync covered, and of every later write each piece or
not, by chance. It is looked at twice: the files themselves, every byte against what was stored
under its key and no digest asked; and by opening it.

`EBBTIDE_TEST_POWER_STATES=500` looks at that many states, `EBBTIDE_TEST_POWER_SEED` draws them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.power.looker import SURELY_KEPT
from tests.power.recorder import DIRECTORY, NOTES

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
STATES = int(os.environ.get("EBBTIDE_TEST_POWER_STATES", "100"))
SEED = int(os.environ.get("EBBTIDE_TEST_POWER_SEED", "1"))
STATES_PER_LIFE = 50
PLANTED_STATES = 30
PIECES = (4096, 4096, 512)
KEPT = (0.1, 0.5, 0.9)
WRITES = (b"W", b"D")  # D: durable by itself, as LMDB writes its meta page
HEADER = struct.Struct("<cBHIQQ")
PATIENCE_S = 120.0


class Event(NamedTuple):
    """One entry of the log; see `power_log.c`."""

    kind: bytes
    path: str
    offset: int
    data: bytes


@pytest.fixture(scope="module")
def logger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that logs writes."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NO C COMPILER: nothing is known about power cuts from this run")
    built = tmp_path_factory.mktemp("logger") / "power_log.so"
    source = HERE / "power_log.c"
    words = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(built), str(source), "-ldl"]
    subprocess.run([compiler, *words], check=True)
    return built


def lived(logger: Path, where: Path, seed: int, planted: str = "") -> list[Event]:
    """Let the recorder live, and read its log."""
    where.mkdir()
    log = where.parent / f"{where.name}.log"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(logger),
        "POWER_LOG": str(log),
        "POWER_LOG_DIR": str(where),
        "PYTHONPATH": str(TOP),
    }
    command = [sys.executable, "-P", str(HERE / "recorder.py"), str(where), str(seed), planted]
    subprocess.run(command, check=True, env=environment, timeout=PATIENCE_S)
    events: list[Event] = []
    text, at = log.read_bytes(), 0
    while at < len(text):
        kind, _, path_bytes, _, offset, length = HEADER.unpack_from(text, at)
        at += HEADER.size
        path = text[at : at + path_bytes].decode()
        at += path_bytes
        data = text[at : at + length] if kind in WRITES else b""
        at += len(data)
        events.append(Event(kind, path, offset, data))
    return events


def build(events: Sequence[Event], where: Path, out: Path, draw: Random) -> int:
    """Write a state after these events. Returns up to which number records were durable."""
    piece, kept = draw.choice(PIECES), draw.choice(KEPT)
    durable: dict[str, int] = {}
    acked = 0
    for event in events:
        if event.kind == b"S":
            durable[event.path] = event.offset - 1  # events are numbered from one
        elif event.kind in WRITES and event.path == str(where / NOTES):
            acked = int.from_bytes(event.data, "little")
    images: dict[str, bytearray] = {}
    for number, event in enumerate(events):
        if event.kind not in (*WRITES, b"T") or event.path.endswith((NOTES, "lock.mdb")):
            continue  # notes are not the tier's; readers' marks mean nothing after a boot
        image = images.setdefault(event.path, bytearray())
        if event.kind == b"T":
            image.extend(bytes(max(0, event.offset - len(image))))
            continue
        stable = event.kind == b"D" or number < durable.get(event.path, -1)
        size = len(event.data) if stable else piece
        for start in range(0, len(event.data), size):
            if stable or draw.random() < kept:
                part = event.data[start : start + size]
                offset = event.offset + start
                image.extend(bytes(max(0, offset - len(image))))
                image[offset : offset + len(part)] = part
    for path, image in images.items():
        # A new FORMAT is written beside the old one; its name is synced before anything is stored.
        place = out / Path(path).relative_to(where).with_suffix("")
        if place.name == "data":
            place = place.with_suffix(".mdb")
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.write_bytes(image)
    return acked


class Looker:
    """`looker.py`, started again whenever a state has killed it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def look(self, place: Path, acked: int) -> Counter[str]:
        """What is found in a state. `not_opened` is 1 when it killed the looker."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(HERE / "looker.py")],
                env={**os.environ, "PYTHONPATH": str(TOP)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{place} {acked}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.close()
            return Counter(not_opened=1)
        return Counter(json.loads(line))

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.communicate(timeout=PATIENCE_S)


def states(logger: Path, tmp_path: Path, count: int, planted: str = "") -> Counter[str]:
    """What is found in so many states, summed."""
    found: Counter[str] = Counter()
    out = tmp_path / "state"
    with closing(Looker()) as looker:
        for life in range(-(-count // STATES_PER_LIFE)):
            where = tmp_path / f"life{life}"
            events = lived(logger, where, SEED * 1000 + life, planted)
            draw = Random(f"{SEED} {life}")
            for _ in range(min(STATES_PER_LIFE, count - life * STATES_PER_LIFE)):
                cut = draw.randrange(len(events) // 8, len(events))
                acked = build(events[:cut], where, out, draw)
                found.update(looker.look(out / DIRECTORY, acked))
                found["states"] += 1
                found["durable"] += min(acked, SURELY_KEPT)
                shutil.rmtree(out)
            shutil.rmtree(where)
    return found


@pytest.mark.timeout(3600)  # of the long form
def test_p57_a_power_cut_loses_nothing_durable_and_names_no_wrong_byte(
    logger: Path, tmp_path: Path
) -> None:
    found = states(logger, tmp_path, STATES)
    print(dict(found))  # noqa: T201  # shown with -s
    assert found["states"] == STATES
    assert found["entries"] > 20 * STATES
    assert found["durable"] > 20 * STATES
    assert (found["wrong"], found["lost"], found["not_opened"], found["unusable"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("planted", ["commit_before_sync", "reuse_before_commit"])
def test_a_wrong_order_is_seen(logger: Path, tmp_path: Path, planted: str) -> None:
    assert states(logger, tmp_path, PLANTED_STATES, planted)["wrong"] > 0
