"""Whether a record is worth a write to the drive at all.

Most prompts come once. To write their blocks wears the drive out and pushes out what others share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ebbtide.tiers.memory import MemoryRecord


class Admission(Protocol):
    """Asked once when a record is due to be written, and once more when it is used again."""

    def admit(self, record: MemoryRecord) -> bool:
        """Whether to write it. Control thread; O(1)."""
        ...


class AdmitAll:
    """Everything is written."""

    def admit(self, record: MemoryRecord) -> bool:
        return True


class AdmitSecondUse:
    """Only what was used again: asked for while memory held it, or stored again after it had gone.

    Each block counts for itself, so that all blocks of a shared prefix are in at its second use.
    What is remembered of those that have gone is `limits.ghost_entries` keys, and no more.
    """

    def admit(self, record: MemoryRecord) -> bool:
        return record.used_again
