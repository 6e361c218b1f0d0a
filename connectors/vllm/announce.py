"""What an operator reads once: what this engine shares, and its first hit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ebbtide.config import capacity_table

if TYPE_CHECKING:
    from ebbtide.connectors.offload.scheduler import OffloadScheduler
    from ebbtide.connectors.vllm.geometry import Geometry
    from ebbtide.connectors.vllm.settings import Settings

_log = logging.getLogger("ebbtide.connectors.vllm")


def log_like_vllm() -> None:
    """Send ebbtide's log lines where vLLM's go, unless somebody has said where already."""
    ours, theirs = logging.getLogger("ebbtide"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())


class Announcements:
    """Log lines that come once per engine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._digest = b""
        self._hit = False
        self._said: set[str] = set()

    def step(self, half: OffloadScheduler, geometry: Geometry) -> None:
        """Once per namespace, when it is open and final; and once, at the first hit."""
        link = half.namespace
        if link.handle is not None and not link.pending and link.digest != self._digest:
            self._digest = link.digest
            per_token = sum(group.record_bytes / group.block_size for group in geometry.groups.all)
            memory = self._settings.config.memory.capacity_bytes
            disk = self._settings.config.disk
            on_disk = f", disk {disk.capacity_bytes / per_token:,.0f} tokens" if disk else ""
            _log.info(
                "ebbtide: namespace %s, memory %s tokens%s; held for it: %d blocks, %d bytes",
                link.digest.hex()[:16],
                f"{memory / per_token:,.0f}",
                on_disk,
                link.held_records,
                link.held_bytes,
            )
            for group in geometry.groups.all:
                table = capacity_table(self._settings.config, geometry.shard_bytes(group))
                _log.info(
                    "ebbtide: filled with blocks of KV group %d alone\n%s", group.number, table
                )
        if not self._hit:
            served = half.tally.tokens_by_source
            tokens = {tier: served[tier] for tier in ("memory", "disk", "remote") if served[tier]}
            if tokens:
                self._hit = True
                words = ", ".join(f"{count} tokens from {tier}" for tier, count in tokens.items())
                _log.info("ebbtide: first hit, %s", words)

    def once(self, text: str, *args: object) -> None:
        """A warning that must not repeat with every step or request."""
        if text not in self._said:
            self._said.add(text)
            _log.warning(text, *args)
