"""Two OpenAI servers on one store: what either has computed, the other restores."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.engine.counters import assert_counters_add_up
from tests.engine.prompts import LONG_RESTORED, prompt, tokens_of
from tests.engine.servers import (
    END_S,
    PATIENT,
    Server,
    SharedStore,
    eventually,
    shared_memory_of,
    transfer_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Plain
    from tests.engine.models import Models

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

USERS = [prompt(seed) for seed in range(3)]
OTHERS = [prompt(seed) for seed in (1001, 1002)]
CATCH_S = 60.0
STEP_S = 0.005


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStore]:
    with SharedStore(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture(scope="module")
def servers(
    models: Models, store: SharedStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Both start at the same time; the second one finds the connector by its name alone."""
    transfer = transfer_config(
        *("--memory", "64MiB", "--socket", store.socket),
        *PATIENT,
    )
    by_name = json.loads(transfer)
    del by_name["kv_connector_module_path"]
    with (
        Server(models["llama"], tmp_path_factory.mktemp("one"), transfer=transfer) as one,
        Server(
            models["llama"], tmp_path_factory.mktemp("two"), transfer=json.dumps(by_name)
        ) as two,
    ):
        yield one.until_ready(), two.until_ready()
        assert "Traceback" not in one.log(), one.log()[-6000:]


def test_what_one_server_computed_the_other_restores(
    plain: Plain, servers: tuple[Server, Server], store: SharedStore
) -> None:
    expected = tokens_of(plain([*USERS, *OTHERS]))
    one, two = servers
    computed = one.one_by_one(USERS)
    restored = two.one_by_one(USERS)
    more = two.one_by_one(OTHERS)
    back = one.one_by_one(OTHERS)
    assert tokens_of(computed) == tokens_of(restored) == expected[:3]
    assert tokens_of(more) == tokens_of(back) == expected[3:]
    assert [answer.cached_tokens for answer in computed + more] == [0] * 5
    assert [answer.cached_tokens for answer in restored + back] == [LONG_RESTORED] * 5
    for server, users in ((one, OTHERS), (two, USERS)):
        counters = server.counters(requests=5)
        assert counters.restored_tokens == len(users) * LONG_RESTORED
        assert_counters_add_up(counters, requests=5)
    eventually(lambda: store.held() == 0, END_S, "slots stay held")


def test_a_server_that_is_killed_leaves_nothing_behind(
    plain: Plain, servers: tuple[Server, Server], store: SharedStore
) -> None:
    """SIGKILL to all its processes while it holds slots; the other one goes on. Comes last."""
    expected = tokens_of(plain([*USERS, *OTHERS]))
    one, two = servers
    over = threading.Event()
    asking = threading.Thread(target=keep_asking, args=(two, over))
    asking.start()
    try:
        stop_while_it_holds(two, store)
        in_shared_memory = shared_memory_of(two.engine_processes())
    finally:
        over.set()
        two.kill()
        asking.join()
    eventually(lambda: store.held() == 0, END_S, f"slots stay held: {store.stats()}")
    assert in_shared_memory, "vLLM's processes are known to share memory"
    eventually(
        lambda: not any(map(os.path.exists, in_shared_memory)),
        END_S,
        f"left behind: {[name for name in in_shared_memory if os.path.exists(name)]}",
    )
    one.forget_counters()
    assert one.reset()
    again = one.one_by_one([*USERS, *OTHERS])
    assert tokens_of(again) == expected
    assert [answer.cached_tokens for answer in again] == [LONG_RESTORED] * 5
    assert_counters_add_up(one.counters(requests=5), requests=5)


def keep_asking(server: Server, over: threading.Event) -> None:
    """Until the server is gone: new prompts, so that it stores all the time."""
    seed = 5000
    with contextlib.suppress(OSError):
        while not over.is_set():
            server.complete(prompt(seed), max_tokens=1)
            seed += 1


def stop_while_it_holds(server: Server, store: SharedStore) -> None:
    """SIGSTOP to its processes, at a moment when slots of the store are reserved or loaded."""
    deadline = time.monotonic() + CATCH_S
    while True:
        assert time.monotonic() < deadline, "the server never holds a slot"
        signal_all(server, signal.SIGSTOP)
        if store.held():
            return
        signal_all(server, signal.SIGCONT)
        time.sleep(STEP_S)


def signal_all(server: Server, number: signal.Signals) -> None:
    for process in server.engine_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
