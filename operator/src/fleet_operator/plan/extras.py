"""What a job has beside its pods and its Service: made before the pods, and removed when it is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.plan.model import DeleteObject, EnsureObject, ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.build import Extra
    from fleet_operator.plan.model import Observed

__all__ = ["ensure", "remove", "unserved"]

_KEPT = "PersistentVolumeClaim"


def ensure(extras: Iterable[Extra], observed: Observed) -> tuple[EnsureObject, ...]:
    """Return what makes the objects that are missing."""
    return tuple(
        EnsureObject(extra.manifest)
        for extra in extras
        if ObjectRef.of(extra.manifest) not in observed.objects
    )


def remove(wanted: Iterable[Extra], observed: Observed) -> tuple[DeleteObject, ...]:
    """Return what removes the objects that are not wanted. Claims hold data, and are never removed."""
    kept = {ObjectRef.of(extra.manifest) for extra in wanted}
    return tuple(DeleteObject(ref) for ref in sorted(observed.objects - kept) if ref.kind != _KEPT)


def unserved(extras: Iterable[Extra], observed: Observed) -> Extra | None:
    """Return the first object that the operator is not set up to make, if there is one."""
    return next(
        (
            extra
            for extra in extras
            if (extra.manifest["apiVersion"], extra.manifest["kind"]) in observed.unserved
        ),
        None,
    )
