"""A layout layer by layer: so that one layer of a record can be copied before the next.

A record holds its layers side by side, in the order of the registered tensors. One layer of it is
therefore a record of its own, of a layout with that one tensor, somewhere inside the whole: whoever
copies whole records copies layers too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ebbtide.kernels.layout import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layer(NamedTuple):
    """One tensor of a layout. Its records begin `record_offset` bytes inside those of the whole."""

    layout: PagedLayout
    record_offset: int

    def offsets(self, records: Sequence[int]) -> list[int]:
        """Where this layer begins in whole records at these offsets."""
        return [offset + self.record_offset for offset in records]


def layers_of(layout: PagedLayout) -> tuple[Layer, ...]:
    """The layers of a layout, in record order; together they are the whole record.

    Cost: as `PagedLayout.from_tensors`. Where an engine keeps all layers of a block side by side
    the whole is one fragment, and each layer a short one.
    """
    layers, offset = [], 0
    for tensor in layout.tensors:
        alone = PagedLayout.from_tensors([tensor], block_dim=layout.block_dim)
        layers.append(Layer(alone, offset))
        offset += alone.record_bytes
    return tuple(layers)
