"""The key of one life of a job: what its replicas have in common and a stranger on the network has not.

It lives in the pods and nowhere else, so that an operator that starts anew finds it there. The API server
takes a pod's name once: whoever creates the first pod of a life has settled the key (docs/adr/0042).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api.names import JOB_KEY, JOB_KEY_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import ObservedPod

__all__ = ["brings_own_key", "key_of_life"]


def brings_own_key(job: FleetJob) -> bool:
    """Whether a template of the job says itself where the key comes from, a Secret for example."""
    variables = (each for role in job.roles for each in job.template(role).main_container.env or ())
    return any(variable.name in (JOB_KEY, JOB_KEY_FILE) for variable in variables)


def key_of_life(pods: Iterable[ObservedPod], life: int, new: str | None) -> tuple[str | None, bool]:
    """Return the key of a life of a job, and whether no pod has it yet.

    Parameters
    ----------
    pods : iterable of ObservedPod
        The job's own.
    life : int
        How often the whole job was started before.
    new : str or None
        What a life gets that has no pods.

    Returns
    -------
    key : str or None
        None where the pods were made without one, by an operator of an earlier version: those that take
        their places must reach the others.
    is_new : bool
    """
    of_life = [pod for pod in pods if pod.attempt.job == life]
    if not of_life:
        return new, new is not None
    return next((pod.key for pod in of_life if pod.key is not None), None), False
