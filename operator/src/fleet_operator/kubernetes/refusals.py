"""The API server's refusals to create objects, temporary or permanent, which statuses report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet_operator.cluster import Key

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.kubernetes.client import ApiError

__all__ = ["Refusal", "Refusals", "is_for_good", "needs_somebody"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server's refusal to create an object for one generation of a job."""

    uid: str | None
    generation: int | None
    name: str
    sentence: str
    over_quota: bool = False

    @classmethod
    def of(cls, job: FleetJob, name: str, sentence: str, *, over_quota: bool = False) -> Refusal:
        """Return a refusal to create the object `name` for the job's current generation."""
        return cls(job.metadata.uid, job.metadata.generation, name, sentence, over_quota)


class Refusals:
    """The refusals to report in each job's status."""

    def __init__(self) -> None:
        self._for_now: dict[Key, Refusal] = {}
        self._for_good: dict[Key, Refusal] = {}

    def for_now(self, job: FleetJob) -> str | None:
        """Return the message of the temporary refusal for this generation of a job, or None."""
        return _sentence(self._for_now.get(Key.of(job)), job)

    def is_over_quota(self, job: FleetJob) -> bool:
        """Return whether a quota caused the temporary refusal for this generation of a job."""
        refusal = self._for_now.get(Key.of(job))
        return refusal is not None and refusal.over_quota and self.for_now(job) is not None

    def for_good(self, job: FleetJob) -> str | None:
        """Return the message of the permanent refusal for this generation of a job, or None."""
        return _sentence(self._for_good.get(Key.of(job)), job)

    def last(self, key: Key) -> Refusal | None:
        """Return the job's temporary refusal, for a later call of `created`."""
        return self._for_now.get(key)

    def created(self, key: Key, before: Refusal | None) -> None:
        """Forget the temporary refusal `before`, unless a newer one replaced it."""
        if self._for_now.get(key) is before:
            self._for_now.pop(key, None)

    def refused(self, key: Key, refusal: Refusal, before: Refusal | None) -> None:
        """Record a temporary refusal to create an object.

        If several objects are created at the same time, the first by name counts. The order of the responses
        varies, so keeping the last one would change the status each time.
        """
        known = self._for_now.get(key)
        if known is None or known is before or known.name >= refusal.name:
            self._for_now[key] = refusal

    def rejected(self, job: FleetJob, refusal: Refusal) -> None:
        """Record a permanent refusal to create an object, unless this generation of the job has one."""
        if self.for_good(job) is None:
            self._for_good[Key.of(job)] = refusal

    def forget(self, key: Key) -> None:
        """Forget the refusals of a deleted job."""
        self._for_now.pop(key, None)
        self._for_good.pop(key, None)


def is_for_good(error: ApiError, kind: str, name: str) -> bool:
    """Return whether a refusal is permanent, so that only a change of the job's spec can resolve it.

    Only the API server's own response about this object counts. A proxy responds with 400 for reasons of its
    own, and so does the API server to a damaged request. A denial by a webhook or a policy of the cluster
    differs only in its message, and may be lifted later.

    Parameters
    ----------
    error : ApiError
        The response to the request that creates the object.
    kind, name : str
        The kind and name of the object.
    """
    said = str(error)
    if said.startswith("admission webhook") or "ValidatingAdmissionPolicy" in said:
        return False
    if error.details is None:
        return False
    if (error.status, error.reason) == (400, "BadRequest"):
        # The details do not name an object that could not be decoded, but the message starts with its kind.
        return said.startswith(f"{kind} in version ")
    return (error.status, error.reason, error.details.get("name")) == (422, "Invalid", name)


def is_over_quota(error: ApiError, name: str) -> bool:
    """Return whether a quota prevented the creation of the object with this name."""
    if error.details is None or "exceeded quota: " not in str(error):
        return False
    return (error.status, error.reason, error.details.get("name")) == (403, "Forbidden", name)


def needs_somebody(error: ApiError) -> bool:
    """Return whether a temporary refusal must be reported, because only a person can resolve it.

    These are quotas, admission rules, missing rights and unresponsive webhooks: the object stays refused
    until a person acts, though the HTTP status is that of an overloaded API server.
    """
    return not error.transient or (error.status == 500 and "failed calling webhook" in str(error))


def _sentence(refusal: Refusal | None, job: FleetJob) -> str | None:
    """Return the message of a refusal if it concerns this generation of the job, else None."""
    if refusal is None:
        return None
    same = (refusal.uid, refusal.generation) == (job.metadata.uid, job.metadata.generation)
    return refusal.sentence if same else None
