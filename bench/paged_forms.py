"""Every form in which engines keep paged KV, as real tensors: for benchmarks and tests of copies.

A form is written by the order of its dimensions in memory: L layer, K key and value, B block,
T token, H head, D head dimension, C key and value of one head side by side, M the latent vector of
multi-head latent attention. A layer is registered as a view with the dimensions in the order of
`view`. Names of packed forms are vLLM's own (as vLLM 0.32), where N stands for the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Form(NamedTuple):
    """`apart`: each layer has an allocation of its own, without an L in `memory`.

    `padding`: unused bytes behind each block, for forms with the block outermost; the last block
    ends with the allocation.
    """

    memory: str
    view: str
    apart: bool = True
    padding: int = 0

    @property
    def block_dim(self) -> int:
        """Where a layer's view has its blocks."""
        return self.view.index("B")


FORMS = {
    "kv_first_nhd": Form("KBTHD", "KBTHD"),
    "kv_first_hnd": Form("KBHTD", "KBTHD"),
    "kv_first_one_allocation": Form("LKBTHD", "KBTHD", apart=False),
    "blocks_first_nhd": Form("BKTHD", "BKTHD"),
    "blocks_first_hnd": Form("BKHTD", "BKTHD"),
    "packed_lbnhc": Form("LBTHC", "BHTC", apart=False),
    "packed_lbhnc": Form("LBHTC", "BHTC", apart=False),
    "packed_blnhc": Form("BLTHC", "BHTC", apart=False),
    "packed_blhnc": Form("BLHTC", "BHTC", apart=False),
    "packed_bhlnc": Form("BHLTC", "BHTC", apart=False),
    "packed_lhbnc": Form("LHBTC", "BHTC", apart=False),
    "mla": Form("BTM", "BTM"),
    "padded": Form("BTHC", "BHTC", padding=64),
    "hybrid": Form("BTHC", "BHTC", padding=4096),  # pages of the size of another group's
}


class Shape(NamedTuple):
    """Sizes of the dimensions. `dim` is a head's; the latent vector has `heads * dim` elements."""

    layers: int
    blocks: int
    tokens: int
    heads: int
    dim: int

    def sizes(self) -> dict[str, int]:
        """By letter."""
        letters = {"L": self.layers, "K": 2, "B": self.blocks, "T": self.tokens, "H": self.heads}
        return letters | {"D": self.dim, "C": 2 * self.dim, "M": self.heads * self.dim}


def shape_of(form: Form, *, layers: int, fragment_bytes: int, total_bytes: int) -> Shape:
    """Two-byte elements, 64 a head, so that fragments have that length and blocks that many bytes.

    A fragment is what lies together of one layer; where layers are neighbours as well, copies join
    them. Both lengths should be powers of two, from 4 KiB on.
    """
    dims = form.memory
    inner = dims[1 + max(dims.index("B"), dims.find("L")) :]
    shape = Shape(layers=layers, blocks=1, tokens=16, heads=1, dim=64)
    count = 2
    for letter in inner:
        count *= shape.sizes()[letter]
    grown = max(1, fragment_bytes // count)
    if "H" in inner or "M" in inner:
        shape = shape._replace(heads=grown)
    else:
        shape = shape._replace(tokens=shape.tokens * grown, heads=4)
    of_block = 2
    for letter in set(dims) - {"B", "L"}:
        of_block *= shape.sizes()[letter]
    return shape._replace(blocks=max(1, total_bytes // (of_block * layers)))


class Pages(NamedTuple):
    """The allocations of one form, and its layers as an engine would register them."""

    form: Form
    buffers: tuple[torch.Tensor, ...]  # dimensions in the order of `form.memory`
    tensors: tuple[torch.Tensor, ...]

    def record(self, block: int) -> torch.Tensor:
        """The bytes of a block, uint8, taken by plain indexing: what a copy is held against."""
        parts = []
        dims = self.form.memory
        for buffer in self.buffers:
            of_block = buffer.select(dims.index("B"), block)
            layers = (
                of_block.unbind(dims.replace("B", "").index("L")) if "L" in dims else [of_block]
            )
            parts += [layer.contiguous().view(-1).view(torch.uint8) for layer in layers]
        return torch.cat(parts).cpu()


def make_pages(
    form: Form, shape: Shape, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0
) -> Pages:
    """Tensors of random bits, NaN among them. Cost: one pass over their bytes."""
    draw = torch.Generator().manual_seed(seed)
    sizes = shape.sizes()
    item = dtype.itemsize
    lengths = [sizes[letter] for letter in form.memory]
    buffers = []
    for _ in range(shape.layers if form.apart else 1):
        count = 1
        for length in lengths:
            count *= length
        stride = count // shape.blocks + form.padding // item
        total = count if not form.padding else (shape.blocks - 1) * stride + count // shape.blocks
        bits = torch.empty(-(-total * item // 8), dtype=torch.int64)
        bits.random_(-(2**63), None, generator=draw)
        whole = bits.to(device).view(torch.uint8)[: total * item].view(dtype)
        strides = list(_contiguous(lengths))
        if form.padding:
            strides[0] = stride
        buffers.append(whole.as_strided(lengths, strides))
    layers: Sequence[torch.Tensor] = buffers
    dims = form.memory
    if not form.apart:
        layers = buffers[0].unbind(dims.index("L"))
        dims = dims.replace("L", "")
    tensors = [layer.permute([dims.index(letter) for letter in form.view]) for layer in layers]
    return Pages(form, tuple(buffers), tuple(tensors))


def _contiguous(lengths: Sequence[int]) -> Sequence[int]:
    strides = [1]
    for length in reversed(lengths[1:]):
        strides.append(strides[-1] * length)
    return strides[::-1]
