"""One OpenAI server with a private store: API, engine core and worker in processes of their own.

It lives through all tests of this file; each of them counts from where it begins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.prompts import LONG_RESTORED, prompt, tokens_of
from tests.engine.servers import PATIENT, Server, transfer_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Plain
    from tests.engine.models import Models

pytestmark = [pytest.mark.server, pytest.mark.timeout(450)]

USERS = [prompt(seed) for seed in range(4)]  # twice what the device holds, more than memory does
SALT, OTHER_SALT = "tenant-4711-secret", "tenant-4712-secret"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def lasting(
    models: Models, disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Started with what `ebbtide config vllm` prints."""
    transfer = transfer_config(
        *("--memory", "16MiB", "--disk", "96MiB", "--dir", str(disk / "tier")),
        *PATIENT,
    )
    with Server(models["llama"], tmp_path_factory.mktemp("server"), transfer=transfer) as found:
        yield found.until_ready()
        processes = found.processes()
        assert len(processes) >= 4, "API, engine core, worker and store are four processes"
        # Looked at before the end, at which vLLM sometimes logs an error of its own.
        assert "Traceback" not in found.log(), found.log()[-6000:]
        found.terminate()


@pytest.fixture
def server(lasting: Server) -> Server:
    """Nobody's blocks are held anywhere, and nothing is counted yet."""
    assert lasting.reset(external=True)
    lasting.probe()
    lasting.forget_counters()
    return lasting


def test_evicted_users_come_back_from_memory_and_disk(plain: Plain, server: Server) -> None:
    expected = tokens_of(plain(USERS))
    first = []
    for number, user in enumerate(USERS, start=1):
        first.append(server.complete(user))
        server.until_stored(64 * number)
    again = server.one_by_one(USERS)
    counters = server.counters(requests=8)
    assert tokens_of(first) == expected
    assert tokens_of(again) == expected
    assert [answer.cached_tokens for answer in first] == [0] * 4
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 4
    assert counters.restored_tokens == 4 * LONG_RESTORED
    assert counters.restored_from("disk") > 0  # memory holds less than two users
    assert counters.total("ebbtide_demoted_blocks_total") >= 4 * 64
    assert counters.total("vllm:external_prefix_cache_hits_total") == 4 * LONG_RESTORED
    assert_counters_add_up(counters, requests=8)


def test_a_reset_of_the_device_leaves_the_tiers_and_one_of_all_does_not(
    plain: Plain, server: Server
) -> None:
    user, (expected,) = USERS[0], plain(USERS[:1])
    answers = [server.complete(user)]
    assert server.reset()
    answers.append(server.complete(user))
    assert server.reset(external=True)
    server.probe()
    answers.append(server.complete(user))
    assert server.reset()
    answers.append(server.complete(user))
    assert tokens_of(answers) == [expected.tokens] * 4
    cached = [answer.cached_tokens for answer in answers]
    assert cached == [0, LONG_RESTORED, 0, LONG_RESTORED]


def test_a_salt_isolates_and_is_written_nowhere(plain: Plain, server: Server, disk: Path) -> None:
    user, (expected,) = USERS[0], plain(USERS[:1])
    answers = []
    for salt in (SALT, OTHER_SALT, None, SALT):
        assert server.reset()
        answers.append(server.complete(user, salt=salt))
    assert_counters_add_up(server.counters(requests=4), requests=4)
    assert tokens_of(answers) == [expected.tokens] * 4
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, LONG_RESTORED]
    (slab,) = disk.glob("tier/*slab*")
    assert slab.read_bytes().strip(b"\0"), "nothing was written to the disk"
    places = [path for path in disk.rglob("*") if path.is_file()] + arenas_of(server)
    assert len(places) > 2
    for salt in (SALT, OTHER_SALT):
        assert salt not in server.metrics()
        assert salt not in server.log()
        assert not [place for place in places if salt.encode() in place.read_bytes()]


def arenas_of(server: Server) -> list[Path]:
    """The store's memory tier, as a file."""
    (store,) = [one for one in server.processes() if "--private" in one.cmdline()]
    files = Path(f"/proc/{store.pid}/fd").iterdir()
    found = [file for file in files if os.readlink(file).startswith("/memfd:")]
    assert found
    return found
