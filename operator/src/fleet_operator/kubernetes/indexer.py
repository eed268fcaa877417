"""The cached objects of one kind, each reduced to the data that decisions use.

Updates come from two sources in no fixed order: the watch, and the responses to our own writes. Three rules
make their order irrelevant. A put never replaces a newer resourceVersion. An object deleted at one version
never returns with an older one. A new list does not remove objects newer than itself. The rules hold within
one history: after a restore from a backup, earlier versions are meaningless.

A `Cache` reduces each observed object, stores it, and notifies of changes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from fleet_operator.cluster import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

T = TypeVar("T")

REMEMBERED_DEAD = 10_000
"""The number of remembered uids of deleted objects; it suffices, as responses are only milliseconds late."""

REMEMBERED_JOBS = 1_000
"""The maximum number of jobs for which the final states of deleted objects are kept."""


class Owner(NamedTuple):
    """The controller that owns an object."""

    uid: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A cached object: its identity, owner and reduced value."""

    key: Key
    uid: str
    version: int  # the object's resourceVersion
    job: Key  # the job that the object's labels name
    owner: Owner | None
    value: T


class Store(Generic[T]):
    """A store of objects of one kind, indexed by namespace and name, and by job.

    Parameters
    ----------
    is_final : callable, optional
        Whether a value is final for an object of its kind. If given, the last state of each deleted object
        is kept (`departed`): the state in the watch's event, or, for an object missing from a list, the
        cached state if it is final.
    """

    def __init__(self, is_final: Callable[[T], bool] | None = None) -> None:
        self._is_final = is_final
        self._departed: dict[Key, dict[str, Entry[T]]] = {}  # by job and uid
        self._entries: dict[Key, Entry[T]] = {}
        self._jobs: defaultdict[Key, dict[Key, Entry[T]]] = defaultdict(dict)
        self._dead: dict[str, int] = {}  # by uid: the version at which the object was seen deleted

    def __len__(self) -> int:
        """Return the number of stored objects."""
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        """Return whether the object with this namespace and name is stored."""
        return key in self._entries

    def get(self, key: Key) -> Entry[T] | None:
        """Return the object with this namespace and name, or None."""
        return self._entries.get(key)

    def of_job(self, job: Key) -> tuple[Entry[T], ...]:
        """Return the objects whose labels refer to `job`, sorted by name."""
        return tuple(entry for _, entry in sorted(self._jobs.get(job, {}).items()))

    def __iter__(self) -> Iterator[Entry[T]]:
        """Return an iterator over all objects."""
        return iter(tuple(self._entries.values()))

    def put(self, entry: Entry[T]) -> bool:
        """Store an object's current state; return whether its reduced value has changed.

        Most changes of an object, for instance of its annotations, do not change its reduced value.
        """
        known = self._entries.get(entry.key)
        if entry.version <= max(self._dead.get(entry.uid, -1), -1 if known is None else known.version):
            return False
        if known is not None:
            self._drop(known)
        self._keep(entry)
        return known is None or _without_version(entry) != _without_version(known)

    def remove(self, key: Key, uid: str, version: int, last: Entry[T] | None = None) -> Entry[T] | None:
        """Record that an object was deleted at `version`; return its entry, or None if it was not stored.

        An object that only lost its label also counts as deleted. If the label is added again, the object
        returns with a newer version.

        Parameters
        ----------
        key, uid, version
            The object, and the version at which it was deleted.
        last : Entry, optional
            The object's last state, if known.
        """
        self._dead[uid] = version
        if len(self._dead) > REMEMBERED_DEAD:
            del self._dead[next(iter(self._dead))]
        known = self._entries.get(key)
        if known is None or known.uid != uid:
            return None
        self._drop(known)
        if last is None and self._is_final is not None and self._is_final(known.value):
            last = known
        if last is not None and self._is_final is not None:
            self._departed.setdefault(last.job, {})[uid] = last
            if len(self._departed) > REMEMBERED_JOBS:
                del self._departed[next(iter(self._departed))]
        return known

    def departed(self, job: Key) -> tuple[Entry[T], ...]:
        """Return the final states of a job's deleted objects, until `let_go` forgets them."""
        return tuple(self._departed.get(job, {}).values())

    def let_go(self, job: Key, uids: Iterable[str] | None = None) -> None:
        """Forget the final states of the given deleted objects of a job, or of all of them."""
        of_job = self._departed.get(job, {})
        for uid in list(of_job if uids is None else uids):
            of_job.pop(uid, None)
        if not of_job:
            self._departed.pop(job, None)

    def replace(
        self, entries: Iterable[Entry[T]], version: int, namespace: str | None, *, restored: bool = False
    ) -> set[Key]:
        """Replace the contents with a new list; return the jobs whose objects have changed.

        Parameters
        ----------
        entries : iterable of Entry
            All objects at `version`.
        version : int
            The list's resourceVersion.
        namespace : str, optional
            The namespace that was listed; all of them if None.
        restored : bool
            Whether the server's history was rolled back, so that known versions are not comparable: then the
            list alone counts.
        """
        if restored:
            self._dead.clear()
            for key, known in list(self._entries.items()):
                if namespace is None or key.namespace == namespace:
                    self._drop(known)
                    # Below every version, so that the list replaces the object, or removes it if it lacks it.
                    self._keep(replace(known, version=-1))
        fresh = {entry.key: entry for entry in entries}
        changed = {entry.job for entry in fresh.values() if self.put(entry)}
        for key, known in list(self._entries.items()):
            listed = namespace is None or key.namespace == namespace
            if listed and key not in fresh and known.version <= version:
                self.remove(key, known.uid, version)
                changed.add(known.job)
        return changed

    def _keep(self, entry: Entry[T]) -> None:
        self._entries[entry.key] = entry
        self._jobs[entry.job][entry.key] = entry

    def _drop(self, entry: Entry[T]) -> None:
        del self._entries[entry.key]
        siblings = self._jobs[entry.job]
        del siblings[entry.key]
        if not siblings:
            del self._jobs[entry.job]


def _without_version(entry: Entry[T]) -> tuple[str, Key, Owner | None, T]:
    return entry.uid, entry.job, entry.owner, entry.value


def key_of(manifest: Mapping[str, Any]) -> Key:
    """Return an object's namespace and name."""
    metadata = manifest["metadata"]
    return Key(metadata["namespace"], metadata["name"])


def version_of(manifest: Mapping[str, Any]) -> int:
    """Return the resourceVersion of an object or list as a comparable number."""
    return int(manifest["metadata"].get("resourceVersion") or 0)


def owner_of(manifest: Mapping[str, Any]) -> Owner | None:
    """Return the controller that owns an object, or None."""
    for reference in manifest["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return Owner(reference["uid"], reference["kind"], reference["name"])
    return None


class Cache(Generic[T]):
    """A cache of objects of one kind, filled by a reflector.

    Parameters
    ----------
    store : Store
        The store of the objects.
    reduce : callable
        Returns the reduced value of an object, or None if the object is not ours.
    on_change : callable
        Called with a job's key when one of its objects has changed.
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
        """Store an object's current state."""
        entry = self.reduce(manifest)
        if entry is not None and self._store.put(entry):
            self._on_change(entry.job)

    def remove(self, manifest: Mapping[str, Any]) -> None:
        """Record an object's deletion and its final state."""
        uid, last = manifest["metadata"]["uid"], self.reduce(manifest)
        known = self._store.remove(key_of(manifest), uid, version_of(manifest), last)
        if known is not None:
            self._on_change(known.job)

    def replace(
        self, entries: Iterable[Entry[T]], version: int, namespace: str | None, *, restored: bool = False
    ) -> None:
        """Replace the contents with a new list, and notify of each job whose objects have changed."""
        for job in self._store.replace(entries, version, namespace, restored=restored):
            self._on_change(job)
