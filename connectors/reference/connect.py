"""Plugging the reference engine into a store: the descriptor of its content, and both halves."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from ebbtide.allocator import none_hash
from ebbtide.connectors.client import Client, SocketClient
from ebbtide.connectors.local_client import LocalClient
from ebbtide.connectors.offload.groups import KVGroup, KVGroups
from ebbtide.connectors.offload.scheduler import OffloadScheduler, SchedulerBounds
from ebbtide.connectors.offload.worker import LOAD_TIMEOUT_S, OffloadWorker
from ebbtide.connectors.reference.device_pool import ReferencePool
from ebbtide.errors import EbbtideError, TierUnavailableError
from ebbtide.kernels.layout import PagedLayout
from ebbtide.tiers.device import device_copies
from ebbtide.tiers.namespace import Descriptor

if TYPE_CHECKING:
    from ebbtide.config_schema import Layerwise
    from ebbtide.connectors.reference.engine import Engine
    from ebbtide.tiers.runtime import ThreadRuntime
    from ebbtide.tiers.store import Store

CONNECT_TIMEOUT_S = 10.0


class Halves(NamedTuple):
    """What `attach_*` gave the engine."""

    scheduler: OffloadScheduler
    worker: OffloadWorker


def describe(engine: Engine, layout: PagedLayout) -> Descriptor:
    """The namespace of this engine's blocks: everything that changes their bytes or meaning."""
    config = engine.runner.config
    shape = (
        f"llama hidden={config.hidden_size} heads={config.num_heads}/{config.num_kv_heads}"
        f"x{config.head_dim} ffn={config.ffn_size} vocab={config.vocab_size}"
        f" rope={config.rope_theta} eps={config.norm_eps} tied={config.tied_head}"
    )
    on_cpu = layout.device.type == "cpu"
    return Descriptor(
        format=1,
        engine="reference/1",
        model=shape,
        weights=f"seeded/{engine.runner.seed}",
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        block_size=engine.block_size,
        layers=tuple(map(config.layer_name, range(config.num_layers))),
        layout=json.dumps(layout.describe(), sort_keys=True),
        tensor_parallel=1,
        pipeline_parallel=1,
        shard_rule="whole",
        attention_isa=torch.backends.cpu.get_cpu_capability() if on_cpu else "",
        hash_algorithm=engine.hash_algorithm,
        hash_root=none_hash(engine.hash_algorithm).hex(),
    )


def attach_socket(
    engine: Engine,
    socket_path: str,
    *,
    bounds: SchedulerBounds | None = None,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    layerwise: Layerwise = "auto",
    required: bool = True,
) -> Halves:
    """Connect both halves to a store's process, each by its own connection, and wait until it
    answers. `layerwise` as in `connector.layerwise`.

    Raises TierUnavailableError when there is no store. Not `required`: waits for nothing, and every
    block is computed until a store answers.
    """
    name = os.urandom(16)
    control = SocketClient(socket_path, name, "scheduler", arena=False, required=required)
    try:
        data = SocketClient(socket_path, name, "worker", arena=True, required=required)
    except TierUnavailableError:
        control.close()
        raise
    return _attach(engine, control, data, bounds, load_timeout_s, layerwise, wait=required)


def attach_local(
    engine: Engine,
    store: Store,
    runtime: ThreadRuntime,
    *,
    bounds: SchedulerBounds | None = None,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    layerwise: Layerwise = "auto",
) -> Halves:
    """Connect both halves to a store in this process. The store stays the caller's.

    `layerwise` as in `connector.layerwise`.
    """
    name = os.urandom(16)
    control, data = LocalClient(store, runtime, name), LocalClient(store, runtime, name)
    return _attach(engine, control, data, bounds, load_timeout_s, layerwise, wait=True)


def _attach(
    engine: Engine,
    control: Client,
    data: Client,
    bounds: SchedulerBounds | None,
    load_timeout_s: float,
    layerwise: Layerwise,
    *,
    wait: bool,
) -> Halves:
    layout = PagedLayout.from_tensors(engine.runner.kv_caches, block_dim=1)
    descriptor = describe(engine, layout).pairs()
    scheduler = OffloadScheduler(
        control,
        ReferencePool(engine.pool, engine.being_computed),
        descriptor=descriptor,
        groups=KVGroups(
            [
                KVGroup(number, engine.block_size, layout.record_bytes, window)
                for number, window in enumerate(engine.runner.config.windows)
            ],
            engine.block_size,
        ),
        bounds=bounds,
    )
    layouts = dict.fromkeys(range(len(engine.runner.config.windows)), layout)
    copies = device_copies(layouts, layerwise=layerwise)
    worker = OffloadWorker(data, copies, load_timeout_s=load_timeout_s)
    halves = Halves(scheduler, worker)
    try:
        if wait:
            _wait_until_ready(halves, control)
        engine.attach(scheduler, worker)
    except EbbtideError:
        worker.close()
        scheduler.close()
        raise
    return halves


def _wait_until_ready(halves: Halves, client: Client) -> None:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while not (halves.scheduler.ready and halves.worker.ready):
        if time.monotonic() > deadline:
            raise TierUnavailableError("The store does not open the namespace")
        client.wait(0.005)
