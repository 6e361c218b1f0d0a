"""`ebbtide serve`: the store's process. A private store is the same, started by an engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from ebbtide.config import check_fits, load_config
from ebbtide.connectors.announce import Announcer, describe_store
from ebbtide.connectors.endpoint import Endpoint
from ebbtide.connectors.server import AsyncioRuntime, StoreServer
from ebbtide.connectors.systemd import Notifier
from ebbtide.errors import ConfigError, EbbtideError
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import POPULATE, READ, WRITE

if TYPE_CHECKING:
    from ebbtide.config import Config, HttpConfig
    from ebbtide.connectors.http.listener import HttpListener

_log = logging.getLogger("ebbtide.serve")

PREDECESSOR_GRACE_S = 5.0  # beyond its drain timeout, for a store that is just ending


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--config", metavar="FILE", help="TOML configuration (or EBBTIDE_CONFIG)")
    parser.add_argument("--extra", metavar="JSON", help="settings that override all others")
    parser.add_argument("--private", action="store_true", help="end with the last engine")
    parser.add_argument("--ready-fd", type=int, metavar="FD", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. 0 when everything was drained to disk, else 1."""
    notifier = Notifier()
    announcer = Announcer(args.ready_fd, None if args.private else notifier)
    try:
        config = load_config(args.extra, file=args.config).config
        if config.socket is None:
            raise ConfigError(
                "A store needs a socket", next_step='Set `socket = "/path/to/socket"`.'
            )
        check_fits(config)
        if config.server.allow_uids and config.server.socket_group is None:
            _log.warning("server.allow_uids lets nobody in whom the socket's mode 0600 keeps out")
        # Taken first and given back last: a successor opens nothing that we still hold.
        patience_s = config.limits.drain_timeout_s + PREDECESSOR_GRACE_S
        endpoint = Endpoint(config.socket, patience_s, config.server.socket_group)
        with contextlib.ExitStack() as last:
            last.callback(endpoint.close)
            http = None if config.http is None else _bind_http(config.http)
            if http is not None:
                last.callback(http.close)
            clean, unwritten_bytes = asyncio.run(
                _serve(config, endpoint, http, announcer, private=args.private)
            )
    except EbbtideError as error:
        announcer.refused(error)
        raise
    announcer.stopped(clean, unwritten_bytes)
    if not clean:
        # I/O threads may hang on a device; to wait for them is to hang too. What is on disk is
        # whole at any moment, so to leave now costs only what was not yet written.
        logging.shutdown()
        os._exit(1)
    return 0


async def _serve(
    config: Config,
    endpoint: Endpoint,
    http: HttpListener | None,
    announcer: Announcer,
    *,
    private: bool,
) -> tuple[bool, int]:
    """Whether all was written, and the bytes that were not."""
    disk, limits = config.disk, config.limits
    threads = {READ: disk.read_threads, WRITE: disk.write_threads} if disk else {}
    runtime = AsyncioRuntime(asyncio.get_running_loop(), threads)
    opened = OpenStore(config, runtime)
    ending = threading.Event()
    clean = hurried = False
    try:
        server = StoreServer(
            opened.store,
            endpoint.listen(),
            private=private,
            allow_uids=config.server.allow_uids,
            drain_timeout_s=limits.drain_timeout_s,
            connections_max=limits.connections_max,
            frame_bytes_max=limits.frame_max_bytes,
            on_stopping=lambda: announcer.stopping(
                limits.drain_timeout_s, opened.store.memory.dirty_bytes
            ),
        )
        if opened.open_disk is not None:
            opened.open_disk.directory.name_socket(endpoint.path)
        if config.memory.populate:
            _populate(opened, runtime, ending)
        if http is not None:
            http.start(server)
        announcer.ready(describe_store(config, opened.open_disk, http.url if http else None))
        clean = await server.run()
        hurried = not clean
        if http is not None and clean:  # else somebody waits for the end
            await http.stop()
        return clean, opened.store.memory.dirty_bytes
    finally:
        ending.set()
        if not hurried:
            runtime.close()
            opened.close(clean)


def _bind_http(config: HttpConfig) -> HttpListener:
    try:
        from ebbtide.connectors.http.listener import HttpListener
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"HTTP needs the package {error.name}",
            next_step="Run: pip install 'ebbtide[http]', or leave [http] out.",
        ) from error
    return HttpListener(config)


def _populate(opened: OpenStore, runtime: AsyncioRuntime, ending: threading.Event) -> None:
    """Back the arena with pages in the background, while the first engine loads its weights."""
    arena = opened.store.arena

    def populate(step: tuple[int, int]) -> None:
        if not ending.is_set():
            arena.populate(*step)

    runtime.start(POPULATE, populate, arena.populate_steps(), lambda outcomes: None)
