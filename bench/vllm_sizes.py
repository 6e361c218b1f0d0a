"""How large the pools and tiers of `ebbtide bench vllm` are: they follow from what is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebbtide.bench.vllm_answer import BLOCK_SIZE, TiersSpec, WorkerSpec
from ebbtide.config_schema import DISK_CAPACITY_MIN, SLOT_ALIGNMENT
from ebbtide.errors import ConfigError
from ebbtide.machine import available_memory_bytes
from ebbtide.sizes import exact_size, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ebbtide.bench.vllm_contestant import Design

SPARE_BLOCKS = 16  # device blocks beyond those of the longest prompt
SPARE_TOKENS = 256  # context beyond the longest prompt
DISK_SPARE = 2.5  # disk tier to what is stored: it must not evict
DISK_BYTES_MIN = max(DISK_CAPACITY_MIN, 64 << 20)
WRITE_AFTER = "100ms"  # not 30 s: what one round left unwritten would be written in another's


@dataclass(frozen=True, slots=True)
class Load:
    """What one case asks of its engines, in tokens.

    `memory_tokens`: room of a memory tier without a disk tier behind it; `small_memory_tokens`: of
    one with it; `disk_tokens`: all that the disk tier has to keep.
    """

    longest: int
    memory_tokens: int
    small_memory_tokens: int
    disk_tokens: int
    always_load: bool

    def check_fits(self, designs: Iterable[Design], record_bytes: int) -> None:
        """Raises ConfigError when the memory tiers and device pools are more than can be had."""
        needed = 0
        for design in designs:
            needed += _bytes(self.longest, record_bytes)
            needed += self.memory_bytes(design, record_bytes) if design.kind != "none" else 0
        available = available_memory_bytes()
        if needed > available:
            raise ConfigError(
                f"The tiers take {format_size(needed)}, and {format_size(available)} of memory "
                "can be had here",
                next_step="Give shorter --lengths, fewer --pairs or a smaller --model.",
            )

    def memory_bytes(self, design: Design, record_bytes: int) -> int:
        """Of a design's memory tier."""
        tokens = self.small_memory_tokens if design.disk else self.memory_tokens
        return _bytes(tokens, record_bytes)

    def spec(
        self,
        design: Design,
        *,
        record_bytes: int,
        directory: str,
        disk_path: str,
        model: str,
        dtype: str,
    ) -> WorkerSpec:
        """A worker of this design. `directory` is its own, for socket and log."""
        return WorkerSpec(
            model=model,
            dtype=dtype,
            max_model_len=self.longest + SPARE_TOKENS,
            device_blocks=-(-self.longest // BLOCK_SIZE) + SPARE_BLOCKS,
            log_path=os.path.join(directory, "log"),
            tiers=self._tiers(design, record_bytes, directory, disk_path if design.disk else None),
        )

    def _tiers(
        self, design: Design, record_bytes: int, directory: str, disk_path: str | None
    ) -> TiersSpec:
        if design.kind == "none":
            return TiersSpec()
        memory_bytes = self.memory_bytes(design, record_bytes)
        if design.kind == "lmcache":
            return TiersSpec("lmcache", memory_bytes=memory_bytes, disk_path=disk_path)
        settings: dict[str, Any] = {
            "socket": os.path.join(directory, "sock"),
            "memory": {"capacity": exact_size(memory_bytes)},
            "connector": {"always_load": self.always_load},
        }
        if disk_path is not None:
            wanted = int(_bytes(self.disk_tokens, record_bytes) * DISK_SPARE)
            settings["disk"] = {
                "path": disk_path,
                "capacity": exact_size(max(wanted, DISK_BYTES_MIN)),
                "write_after": WRITE_AFTER,
            }
        return TiersSpec("ebbtide", settings, disk_path=disk_path)


def _bytes(tokens: int, record_bytes: int) -> int:
    """Slots for these tokens' records."""
    stride = -(-record_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return -(-tokens // BLOCK_SIZE) * stride
