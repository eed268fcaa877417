"""What a job has beside its pods and its Service: made before the pods, and removed when it is not needed.

What the job, or the operator's settings, want another way than when an object was made is made anew. What
somebody else has changed in an object stays as it is: a webhook of the cluster's would change it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.plan.model import DeleteObject, EnsureObject, ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.build import Extra
    from fleet_operator.plan.model import Observed

__all__ = ["cannot_make", "ensure", "remove", "unserved"]

_KEPT = "PersistentVolumeClaim"


def ensure(extras: Iterable[Extra], observed: Observed) -> tuple[EnsureObject | DeleteObject, ...]:
    """Return what makes the objects that are missing, and makes those anew that are wanted another way."""
    actions: list[EnsureObject | DeleteObject] = []
    for extra in extras:
        ref = ObjectRef.of(extra.manifest)
        there = observed.objects.get(ref)
        said = there.made_from if there is not None else None
        outdated = said not in (None, extra.made_from) and ref.kind != _KEPT
        if outdated:
            actions.append(DeleteObject(ref))
        if outdated or there is None:
            actions.append(EnsureObject(extra.manifest))
    return tuple(actions)


def remove(wanted: Iterable[Extra], observed: Observed) -> tuple[DeleteObject, ...]:
    """Return what removes the objects that are not wanted. Claims hold data, and are never removed."""
    kept = {ObjectRef.of(extra.manifest) for extra in wanted}
    return tuple(DeleteObject(ref) for ref in sorted(observed.objects.keys() - kept) if ref.kind != _KEPT)


def unserved(extras: Iterable[Extra], observed: Observed) -> Extra | None:
    """Return the first object that the operator is not set up to make, if there is one."""
    return next((extra for extra in extras if _is_unserved(extra, observed)), None)


def cannot_make(extra: Extra, observed: Observed) -> bool:
    """Return whether the operator is not set up to make an object, or somebody else's has its name."""
    ref = ObjectRef.of(extra.manifest)
    return _is_unserved(extra, observed) or f"{ref.kind}/{ref.name}" in observed.foreign


def _is_unserved(extra: Extra, observed: Observed) -> bool:
    return (extra.manifest["apiVersion"], extra.manifest["kind"]) in observed.unserved
