"""What the API server has refused to create: for now, which a status tells until it is there, or for good."""

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
    """The API server's sentence about one object that one generation of one job wanted to create."""

    uid: str | None
    generation: int | None
    name: str
    sentence: str
    over_quota: bool = False

    @classmethod
    def of(cls, job: FleetJob, name: str, sentence: str, *, over_quota: bool = False) -> Refusal:
        """Return what was said of an object of this name, and whether a quota has no room for it."""
        return cls(job.metadata.uid, job.metadata.generation, name, sentence, over_quota)


class Refusals:
    """Knows of each job which refusal a person should hear of."""

    def __init__(self) -> None:
        self._for_now: dict[Key, Refusal] = {}
        self._for_good: dict[Key, Refusal] = {}

    def for_now(self, job: FleetJob) -> str | None:
        """Return what was said when something could not be created, if it was about this very job."""
        return _sentence(self._for_now.get(Key.of(job)), job)

    def is_over_quota(self, job: FleetJob) -> bool:
        """Whether what `for_now` returns was said because a quota has no room."""
        refusal = self._for_now.get(Key.of(job))
        return refusal is not None and refusal.over_quota and self.for_now(job) is not None

    def for_good(self, job: FleetJob) -> str | None:
        """Return what was said of an object that can never be, if it was about this very job."""
        return _sentence(self._for_good.get(Key.of(job)), job)

    def last(self, key: Key) -> Refusal | None:
        """Return what stands of a job before something else is created."""
        return self._for_now.get(key)

    def created(self, key: Key, before: Refusal | None) -> None:
        """Forget why nothing could be created, unless that was said of another object meanwhile."""
        if self._for_now.get(key) is before:
            self._for_now.pop(key, None)

    def refused(self, key: Key, refusal: Refusal, before: Refusal | None) -> None:
        """Note why an object cannot be created for now.

        Of those that are asked for at the same time the first by name speaks: whichever was answered last
        would be another one each time, and each time a news to write.
        """
        known = self._for_now.get(key)
        if known is None or known is before or known.name >= refusal.name:
            self._for_now[key] = refusal

    def rejected(self, job: FleetJob, refusal: Refusal) -> None:
        """Note why an object can never be, unless another has been told of."""
        if self.for_good(job) is None:
            self._for_good[Key.of(job)] = refusal

    def forget(self, key: Key) -> None:
        """Know nothing of a job that is gone."""
        self._for_now.pop(key, None)
        self._for_good.pop(key, None)


def is_for_good(error: ApiError, kind: str, name: str) -> bool:
    """Whether an object as written can never be: the job's mistake, and only another spec mends it.

    Only the API server's own word about this very object counts. A proxy answers 400 for reasons of its own,
    and so does the API server for a request that arrived damaged. What a webhook or a policy of the cluster
    denies looks the same but for its words, and may be let through tomorrow.

    Parameters
    ----------
    error : ApiError
        The answer to the request that was to create the object.
    kind, name : str
        The object's.
    """
    said = str(error)
    if said.startswith("admission webhook") or "ValidatingAdmissionPolicy" in said:
        return False
    if error.details is None:
        return False
    if (error.status, error.reason) == (400, "BadRequest"):
        # Nothing in its details names an object that could not be decoded. Its message begins with the kind.
        return said.startswith(f"{kind} in version ")
    return (error.status, error.reason, error.details.get("name")) == (422, "Invalid", name)


def is_over_quota(error: ApiError, name: str) -> bool:
    """Whether the API server has refused an object of this name because a quota has no room for it."""
    if error.details is None or "exceeded quota: " not in str(error):
        return False
    return (error.status, error.reason, error.details.get("name")) == (403, "Forbidden", name)


def needs_somebody(error: ApiError) -> bool:
    """Whether somebody must do something about a refusal for now, and so must hear of it.

    That is a quota, an admission rule, a right that is missing, or a webhook that does not answer: what it
    is about stays refused until it does, though the status is that of an API server in trouble.
    """
    return not error.transient or (error.status == 500 and "failed calling webhook" in str(error))


def _sentence(refusal: Refusal | None, job: FleetJob) -> str | None:
    """Return what was said, if it was about this very generation of this very job."""
    if refusal is None:
        return None
    same = (refusal.uid, refusal.generation) == (job.metadata.uid, job.metadata.generation)
    return refusal.sentence if same else None
