"""`ebbtide serve`: the store's process. A private store is the same, started by an engine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING

from ebbtide.config import check_fits, load_config
from ebbtide.connectors.server import AsyncioRuntime, StoreServer
from ebbtide.errors import ConfigError, EbbtideError
from ebbtide.tiers.opening import OpenStore
from ebbtide.tiers.runtime import POPULATE, READ, WRITE

if TYPE_CHECKING:
    from ebbtide.config import Config

_log = logging.getLogger("ebbtide.serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--config", metavar="FILE", help="TOML configuration")
    parser.add_argument("--extra", metavar="JSON", help="settings that override all others")
    parser.add_argument("--private", action="store_true", help="end with the last engine")
    parser.add_argument("--ready-fd", type=int, metavar="FD", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop. 0 when everything was drained to disk, else 1."""
    ready_fd = args.ready_fd
    try:
        config = load_config(args.extra, file=args.config).config
        check_fits(config)
        return asyncio.run(_serve(config, private=args.private, ready_fd=ready_fd))
    except EbbtideError as error:
        _tell(ready_fd, f"error {error}\n")
        raise


async def _serve(config: Config, *, private: bool, ready_fd: int | None) -> int:
    if config.socket is None:
        raise ConfigError("A store needs a socket", next_step='Set `socket = "/path/to/socket"`.')
    disk = config.disk
    threads = {READ: disk.read_threads, WRITE: disk.write_threads} if disk else {}
    runtime = AsyncioRuntime(asyncio.get_running_loop(), threads)
    try:
        opened = OpenStore(config, runtime)
        clean = False
        try:
            server = StoreServer(
                opened,
                config.socket,
                private=private,
                drain_timeout_s=config.limits.drain_timeout_s,
                connections_max=config.limits.connections_max,
            )
            if config.memory.populate:
                _populate(opened, runtime)
            _announce(opened, config)
            _tell(ready_fd, "ready\n")
            clean = await server.run()
        finally:
            opened.close(clean)
    finally:
        runtime.close()
    return 0 if clean or disk is None else 1


def _populate(opened: OpenStore, runtime: AsyncioRuntime) -> None:
    """Back the arena with pages in the background, while the first engine loads its weights."""
    arena = opened.store.arena

    def populate(step: tuple[int, int]) -> None:
        arena.populate(*step)

    runtime.start(POPULATE, populate, arena.populate_steps(), lambda outcomes: None)


def _announce(opened: OpenStore, config: Config) -> None:
    disk = opened.open_disk
    if disk is None:
        _log.info("store ready: memory %d bytes, no disk tier", config.memory.capacity_bytes)
        return
    _log.info(
        "store ready: memory %d bytes, disk %d bytes in %s (%s), %d records found, last stop %s",
        config.memory.capacity_bytes,
        disk.tier.space.capacity_bytes,
        disk.directory.path,
        "direct I/O" if disk.direct else "buffered I/O",
        disk.tier.records,
        "clean" if disk.was_clean else "not clean",
    )


def _tell(ready_fd: int | None, line: str) -> None:
    """One line to the process that started us; then the pipe is closed."""
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, line.encode())
    except OSError:
        sys.stderr.write("ebbtide: the process that started this store is gone\n")
    os.close(ready_fd)
