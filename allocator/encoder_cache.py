"""Which outputs of the multi-modal encoder are kept, for whom, and which goes next.

Facts (as vLLM 0.32). The unit is one encoder embedding, the key an item's identifier. A request
references an entry once, however many of its items have that identifier. An entry without a
reference stays until room is needed; the one that has been without for longest goes first. Room is
made by `can_allocate`, before it is known whether the item will be scheduled.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ebbtide.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ebbtide.allocator.extra_keys import MultiModalItem


class EncoderInput(NamedTuple):
    """One item as the encoder sees it: its identifier, and how many embeddings it becomes."""

    identifier: str
    num_embeds: int

    @classmethod
    def of(cls, item: MultiModalItem, is_embed: Sequence[bool] | None = None) -> EncoderInput:
        """The input of an item of a prompt. `is_embed` marks, among the item's placeholders, those
        that take an embedding; the others are text around it. None means all. O(placeholders).

        Raises MisuseError unless there is one mark per placeholder.
        """
        if is_embed is None:
            return cls(item.identifier, item.length)
        if len(is_embed) != item.length:
            raise MisuseError("one mark per placeholder", item=item, marks=len(is_embed))
        return cls(item.identifier, sum(map(bool, is_embed)))


class EncoderRequest(Protocol):
    """What the encoder cache reads of a request. `encoder_inputs` stand in prompt order."""

    @property
    def request_id(self) -> str: ...

    @property
    def encoder_inputs(self) -> Sequence[EncoderInput]: ...


class _Entry:
    __slots__ = ("num_embeds", "requests")

    def __init__(self, num_embeds: int) -> None:
        self.num_embeds = num_embeds
        self.requests: set[str] = set()


class EncoderCache:
    """Up to `capacity_embeds` encoder embeddings, shared between requests by identifier.

    The order of calls per item: `check_and_update`; when that is False, `can_allocate`; when that
    is True and the item is scheduled, `allocate`. Then `free_encoder_input` once the item's tokens
    are computed, or `free` for all of a request that ends or is preempted. `take_freed` once per
    step tells the workers what to drop. Numbers only: the embeddings lie with the workers.

    Not thread-safe: belongs to the thread of the engine's scheduler. Raises MisuseError for a
    negative capacity.
    """

    def __init__(self, capacity_embeds: int) -> None:
        if capacity_embeds < 0:
            raise MisuseError("a capacity is not negative", capacity_embeds=capacity_embeds)
        self.capacity_embeds = capacity_embeds
        self._entries: dict[str, _Entry] = {}
        # The indices that a request holds. A set, because `free` goes through them in its order, as
        # vLLM does, and that order shows in what is evicted first.
        self._held: dict[str, set[int]] = {}
        self._unreferenced: OrderedDict[str, int] = OrderedDict()
        self._freed: list[str] = []
        self.free_embeds = capacity_embeds
        self.freeable_embeds = capacity_embeds

    @property
    def unreferenced(self) -> list[str]:
        """Identifiers of the entries without a reference, next to be evicted first. O(entries)."""
        return list(self._unreferenced)

    def num_embeds(self, identifier: str) -> int | None:
        """The size of an entry, None if there is none. O(1).

        A request whose item has another size under this identifier cannot be served: fail it.
        """
        entry = self._entries.get(identifier)
        return None if entry is None else entry.num_embeds

    def held(self, request: EncoderRequest) -> set[int]:
        """The indices of the inputs that `request` holds, a copy."""
        return set(self._held.get(request.request_id, ()))

    def check_and_update(self, request: EncoderRequest, index: int) -> bool:
        """Whether input `index` is cached. If so, `request` references it from now on. O(1)."""
        identifier = _input(request, index).identifier
        entry = self._entries.get(identifier)
        if entry is None:
            return False
        if not entry.requests:
            self.freeable_embeds -= self._unreferenced.pop(identifier)
        self._reference(entry, request, index)
        return True

    def can_allocate(
        self, request: EncoderRequest, index: int, compute_budget: int, scheduled_embeds: int = 0
    ) -> bool:
        """Whether input `index` may be computed in this step and has room. Amortised O(1).

        `compute_budget` is how many embeddings the step may still compute, `scheduled_embeds` how
        many it was promised already. Makes room by evicting entries without a reference, oldest
        first, but allocates nothing; what was evicted stays so if the item is not scheduled.
        """
        needed = _input(request, index).num_embeds
        if needed > compute_budget:
            return False
        needed += scheduled_embeds
        if needed > self.freeable_embeds:  # which counts the free ones too
            return False
        while needed > self.free_embeds:
            identifier, num_embeds = self._unreferenced.popitem(last=False)
            del self._entries[identifier]
            self._freed.append(identifier)
            self.free_embeds += num_embeds
        return True

    def allocate(self, request: EncoderRequest, index: int) -> None:
        """Give input `index` its room, referenced by `request`. O(1).

        Raises MisuseError, and changes nothing, unless it fits, or when the identifier is cached:
        then `check_and_update` takes it, and a second allocation would lose room for good.
        """
        identifier, num_embeds = _input(request, index)
        if identifier in self._entries:
            raise MisuseError(
                "the encoder output is cached already",
                next_step="Take it with check_and_update",
                identifier=identifier,
                size=num_embeds,
                cached_size=self._entries[identifier].num_embeds,
            )
        if num_embeds > self.free_embeds:
            raise MisuseError(
                "no room for an encoder output",
                next_step="Ask can_allocate first",
                identifier=identifier,
                size=num_embeds,
                free=self.free_embeds,
            )
        entry = self._entries[identifier] = _Entry(num_embeds)
        self.free_embeds -= num_embeds
        self.freeable_embeds -= num_embeds
        self._reference(entry, request, index)

    def free_encoder_input(self, request: EncoderRequest, index: int) -> None:
        """Input `index` is not needed any more. O(inputs that the request holds).

        The reference goes with the last index that has this identifier; the entry stays cached. An
        index that is not held is ignored.
        """
        identifier = _input(request, index).identifier
        held = self._held.get(request.request_id)
        if held is None or index not in held:
            return
        held.discard(index)
        if not held:
            del self._held[request.request_id]
        if any(request.encoder_inputs[other].identifier == identifier for other in held):
            return
        entry = self._entries[identifier]
        entry.requests.discard(request.request_id)
        if not entry.requests:
            self._unreferenced[identifier] = entry.num_embeds
            self.freeable_embeds += entry.num_embeds

    def free(self, request: EncoderRequest) -> None:
        """The request ended or was preempted: free all inputs that it holds."""
        for index in list(self._held.get(request.request_id, ())):
            self.free_encoder_input(request, index)

    def take_freed(self) -> list[str]:
        """Identifiers evicted since the last call, in order, for the workers to drop.

        One that was evicted and allocated again in the meantime is left out: its output is needed.
        """
        freed = [identifier for identifier in self._freed if identifier not in self._entries]
        self._freed.clear()
        return freed

    def reset(self) -> None:
        """Forget everything, references included. For when the model's weights have changed."""
        self._entries.clear()
        self._held.clear()
        self._unreferenced.clear()
        self._freed.clear()
        self.free_embeds = self.freeable_embeds = self.capacity_embeds

    def check_integrity(self) -> None:
        """Raise MisuseError unless counts, references and order agree. For tests. O(entries)."""
        used = sum(entry.num_embeds for entry in self._entries.values())
        if used + self.free_embeds != self.capacity_embeds:
            raise MisuseError("embeddings are lost", used=used, free=self.free_embeds)
        idle = {
            name: entry.num_embeds for name, entry in self._entries.items() if not entry.requests
        }
        if idle != dict(self._unreferenced):
            raise MisuseError(
                "the unreferenced entries are not those listed", idle=idle, listed=self.unreferenced
            )
        if self.free_embeds + sum(idle.values()) != self.freeable_embeds or self.free_embeds < 0:
            raise MisuseError(
                "the freeable count is wrong", free=self.free_embeds, freeable=self.freeable_embeds
            )
        references: dict[str, int] = {}
        for entry in self._entries.values():
            for request_id in entry.requests:
                references[request_id] = references.get(request_id, 0) + 1
        if references.keys() != self._held.keys() or any(
            references[request_id] > len(held) for request_id, held in self._held.items()
        ):
            raise MisuseError(
                "references and holders differ", references=references, held=self._held
            )

    def _reference(self, entry: _Entry, request: EncoderRequest, index: int) -> None:
        entry.requests.add(request.request_id)
        self._held.setdefault(request.request_id, set()).add(index)


def _input(request: EncoderRequest, index: int) -> EncoderInput:
    inputs = request.encoder_inputs
    if not 0 <= index < len(inputs):
        raise MisuseError(
            "the request has no such input",
            request_id=request.request_id,
            index=index,
            inputs=len(inputs),
        )
    return inputs[index]
