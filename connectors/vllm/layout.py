"""Where the bytes of a block lie in vLLM's tensors: one `PagedLayout` per KV-cache group.

Facts (vLLM 0.29 to 0.32): every layer is a view `[blocks, heads, states, content]` of some storage,
in one of several physical orders. A block of the block manager may be split into several kernel
blocks: then the first dimension is a multiple of the manager's number of blocks, at uniform
stride. Layers of different groups may alias the same bytes. Layers that share another layer's
cache point at that layer's tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError, MisuseError
from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


def layouts_of(
    kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig, groups: Iterable[int]
) -> dict[int, PagedLayout]:
    """By group, for those groups of which this rank has layers.

    Raises ConfigError for tensors that no record can be made of.
    """
    layouts = {}
    for number in groups:
        tensors = []
        seen: set[tuple[int, int]] = set()
        for name in config.kv_cache_groups[number].layer_names:
            tensor = kv_caches.get(name)
            if tensor is None:
                continue
            place = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()))
            if place not in seen:
                seen.add(place)
                tensors.append(_by_manager_block(name, tensor, config.num_blocks))
        if tensors:
            layouts[number] = _layout(number, tensors)
    return layouts


def _by_manager_block(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The same bytes with the manager's blocks as first dimension."""
    rows = int(tensor.shape[0])
    if rows % num_blocks:
        raise ConfigError(
            "The KV cache of a layer has no whole number of rows per block",
            next_step="Run this model without ebbtide, and report its cache layout.",
            layer=name,
            shape=tuple(tensor.shape),
            num_blocks=num_blocks,
        )
    ratio = rows // num_blocks
    if ratio == 1:
        return tensor
    stride = tensor.stride(0)
    return tensor.as_strided(
        (num_blocks, ratio, *tensor.shape[1:]),
        (stride * ratio, *tensor.stride()),
        tensor.storage_offset(),
    )


def _layout(number: int, tensors: list[torch.Tensor]) -> PagedLayout:
    try:
        return PagedLayout.from_tensors(tensors, block_dim=0)
    except MisuseError as error:
        raise ConfigError(
            f"The blocks of KV-cache group {number} cannot be copied: {error.problem}",
            next_step="Choose a KV cache layout that keeps a block's bytes together"
            " (VLLM_KV_CACHE_LAYOUT=HND), or run without ebbtide.",
            **error.context,
        ) from error
