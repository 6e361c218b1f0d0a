"""Stage of `ebbtide bench device`: a prefix restored against one computed, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ebbtide.bench.device_rig import DeviceRig, shuffled
from ebbtide.connectors.reference.model import ModelConfig
from ebbtide.connectors.reference.runner import Part, Runner
from ebbtide.kernels.arena_records import ArenaRecords
from ebbtide.kernels.fragments import FragmentTable
from ebbtide.kernels.layout import PagedLayout
from ebbtide.kernels.methods import TorchCopies

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 16
NEW_TOKENS = 16
SMALL = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128
)
FULL = ModelConfig(
    hidden_size=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=5632,
    max_position=40960,
    dtype=torch.bfloat16,
)


def restore(rig: DeviceRig) -> None:
    """The time until the first token behind a prefix of some lengths, each way."""
    config = rig.pick(SMALL, FULL)
    for tokens in rig.pick((64,), (2048, 8192, 32768)):
        if rig.left_s < 0.1 * rig.budget_s:
            rig.row("restore.stopped", left_s=rig.left_s)
            return
        _Restore(rig, config, tokens).measure()


class _Restore:
    """One length: a runner, its blocks, and the records that they were copied to."""

    def __init__(self, rig: DeviceRig, config: ModelConfig, tokens: int) -> None:
        self.rig = rig
        self.tokens = tokens
        count = tokens // BLOCK
        self.runner = Runner(
            config,
            num_blocks=count + 8,
            block_size=BLOCK,
            device=rig.device.type,
        )
        draw = torch.Generator().manual_seed(2)
        prompt = torch.randint(0, config.vocab_size, (tokens + NEW_TOKENS,), generator=draw)
        self.prompt: list[int] = prompt.tolist()
        self.blocks = shuffled(count + 8, count + 1)
        caches = self.runner.kv_caches
        self.table = FragmentTable.of(PagedLayout.from_tensors(caches, block_dim=1))
        size = self.table.record_bytes
        offsets = [number * size for number in range(count)]
        self.records = ArenaRecords(self.blocks[:count], rig.pinned(count * size), offsets)

    def measure(self) -> None:
        """Compute once, store, then restore by each method and each way."""
        rig = self.rig
        expected = self._first_token(self.prompt, 0)
        recompute_ms = rig.wall_ms(lambda: self._first_token(self.prompt, 0))
        TorchCopies(self.table).gather(self.records, stream=rig.stream)
        rig.synchronize()
        ways: dict[str, Callable[[], torch.Tensor]] = {
            name: lambda method=method: self._whole(method.scatter)  # type: ignore[misc]  # bound now
            for name, method in rig.methods(self.table).items()
        }
        for way, work in ways.items():
            for cache in self.runner.kv_caches:
                cache.zero_()
            got = work()
            error = float((got - expected).abs().max() / expected.abs().max())
            took_ms = rig.wall_ms(work)
            rig.row(
                "restore",
                ok=error < 0.05,
                way=way,
                tokens=self.tokens,
                mib=self.records.arena.numel() / (1 << 20),
                took_ms=took_ms,
                recompute_ms=recompute_ms,
                times_faster=recompute_ms / took_ms,
                error=error,
            )

    def _first_token(self, tokens: list[int], position: int) -> torch.Tensor:
        return self.runner.execute([Part(tokens, position, [self.blocks])])

    def _behind_prefix(self) -> torch.Tensor:
        return self._first_token(self.prompt[self.tokens :], self.tokens)

    def _whole(self, scatter: Callable[..., None]) -> torch.Tensor:
        scatter(self.records, stream=self.rig.stream)
        return self._behind_prefix()
