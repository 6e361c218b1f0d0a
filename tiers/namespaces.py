"""The namespaces of one store: the open ones, and what the disk tier's directory knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.errors import NoSpaceError
from ebbtide.tiers.index import StoredNamespace
from ebbtide.tiers.namespace import Namespace, namespace_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Namespaces:
    """Gives out handles and reset epochs. Control thread only; every call is O(1) but iteration."""

    def __init__(self, stored: Sequence[StoredNamespace], namespaces_max: int) -> None:
        self._namespaces_max = namespaces_max
        self._stored = {namespace.digest: namespace for namespace in stored}
        self._last_epoch = max((namespace.epoch for namespace in stored), default=0)
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_handle: list[Namespace] = []
        self._by_epoch: dict[int, Namespace] = {}

    def open(self, pairs: list[list[object]], *, pending: bool) -> Namespace:
        """The namespace of a descriptor; the same object for the same descriptor. Raises
        NoSpaceError for one too many.
        """
        digest = namespace_digest(pairs)
        namespace = self._by_digest.get(digest)
        if namespace is not None:
            namespace.pending = namespace.pending and pending
            return namespace
        known = self._stored.get(digest)
        if known is None and len(self._stored.keys() | self._by_digest.keys()) >= (
            self._namespaces_max
        ):
            raise NoSpaceError(
                "The store knows as many namespaces as it may",
                next_step="Stop it and begin with another [disk] path, or without one.",
                namespaces_max=self._namespaces_max,
            )
        epoch = known.epoch if known else self._new_epoch()
        namespace = Namespace(len(self._by_handle), digest, pairs, epoch, pending)
        self._by_digest[digest] = namespace
        self._by_handle.append(namespace)
        self._by_epoch[epoch] = namespace
        return namespace

    def by_handle(self, handle: int) -> Namespace | None:
        return self._by_handle[handle] if 0 <= handle < len(self._by_handle) else None

    def latest(self, count: int) -> list[Namespace]:
        """Those opened last."""
        return self._by_handle[-count:]

    def by_epoch(self, epoch: int) -> Namespace | None:
        """The open namespace whose present epoch it is."""
        return self._by_epoch.get(epoch)

    def by_digest(self, digest: bytes) -> Namespace | StoredNamespace | None:
        """The open namespace, or what the directory knows of one that is not open."""
        return self._by_digest.get(digest) or self._stored.get(digest)

    def to_store(self, namespace: Namespace) -> StoredNamespace | None:
        """What the directory does not have of it yet; from now on it counts as stored."""
        if namespace.digest in self._stored:
            return None
        return self._store(namespace)

    def renew(self, namespace: Namespace) -> StoredNamespace:
        """Begin a new life after a reset: a new epoch, which the directory has to store."""
        del self._by_epoch[namespace.epoch]
        namespace.epoch = self._new_epoch()
        self._by_epoch[namespace.epoch] = namespace
        return self._store(namespace)

    def closed(self) -> list[StoredNamespace]:
        """Those that the directory knows and no engine of this store has opened."""
        return [stored for digest, stored in self._stored.items() if digest not in self._by_digest]

    def digests(self) -> list[bytes]:
        """Of all that are open or stored, in order."""
        return sorted({*self._by_digest, *self._stored})

    def stored(self) -> list[StoredNamespace]:
        """All that the directory has to know, with their present epochs."""
        return list(self._stored.values())

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_handle)

    def _store(self, namespace: Namespace) -> StoredNamespace:
        stored = StoredNamespace(namespace.digest, namespace.epoch, namespace.descriptor)
        self._stored[namespace.digest] = stored
        return stored

    def _new_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch
