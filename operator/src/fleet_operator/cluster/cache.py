"""What becomes of an object that is seen: it is reduced to what is kept of it, stored, and told of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fleet_operator.cluster.store import key_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fleet_operator.cluster.interface import Key
    from fleet_operator.cluster.store import Entry, Store

__all__ = ["Cache"]

T = TypeVar("T")


class Cache(Generic[T]):
    """One kind of object, as far as it has been seen.

    Parameters
    ----------
    store : Store
        Where the objects go.
    reduce : callable
        What is kept of an object; None if it is none of ours.
    on_change : callable
        Told the job's key when something of it has changed.
    """

    def __init__(
        self,
        store: Store[T],
        reduce: Callable[[Mapping[str, Any]], Entry[T] | None],
        on_change: Callable[[Key], None],
    ) -> None:
        self._store = store
        self.reduce = reduce
        self._on_change = on_change

    def put(self, manifest: Mapping[str, Any]) -> None:
        """Take an object as it is now."""
        entry = self.reduce(manifest)
        if entry is not None and self._store.put(entry):
            self._on_change(entry.job)

    def remove(self, manifest: Mapping[str, Any]) -> None:
        """Take an object as it was last."""
        uid, last = manifest["metadata"]["uid"], self.reduce(manifest)
        known = self._store.remove(key_of(manifest), uid, version_of(manifest), last)
        if known is not None:
            self._on_change(known.job)

    def replace(
        self, entries: Iterable[Entry[T]], version: int, namespace: str | None, *, restored: bool = False
    ) -> None:
        """Take over a fresh list; see `Store.replace`."""
        for job in self._store.replace(entries, version, namespace, restored=restored):
            self._on_change(job)
