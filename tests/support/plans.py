"""Helpers for tests of plans: observed pods, plans as text, and a job that is planned repeatedly."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts
from fleet_operator.plan import plan
from fleet_operator.plan.model import (
    Attempt,
    CreatePod,
    CreateService,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteService,
    EnsureObject,
    Observed,
    ObservedPod,
    Plan,
    PodPhase,
)
from tests.support import jobs

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import Action

__all__ = ["T0", "Story", "at", "describe", "ended", "pending", "pserver", "trainer"]

NO_POLICIES = frozenset({("networking.k8s.io/v1", "NetworkPolicy")})
"""The kinds that an operator without the feature networkPolicies does not serve."""
T0 = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """Return the time that is the given number of seconds after the start of the test."""
    return T0 + timedelta(seconds=seconds)


def pod(role: Role, index: int, attempt: str = "0.0", **fields: Any) -> ObservedPod:
    """Return a running pod of the job ``digits`` with the given fields."""
    name = f"digits-{role.value}-{index}"
    fields = {"phase": PodPhase.RUNNING, "container": "fleet", "uid": f"{name}@{attempt}"} | fields
    return ObservedPod(name=name, role=role, index=index, attempt=Attempt.parse(attempt), **fields)


def pserver(index: int = 0, attempt: str = "0.0", **fields: Any) -> ObservedPod:
    """Return a running, ready pod of a parameter server."""
    return pod(Role.PSERVER, index, attempt, **({"ready": True} | fields))


def trainer(index: int = 0, attempt: str = "0.0", **fields: Any) -> ObservedPod:
    """Return a running pod of a trainer."""
    return pod(Role.TRAINER, index, attempt, **fields)


def ended(pod: ObservedPod, exit_code: int | None = 0, **fields: Any) -> ObservedPod:
    """Return a pod whose main container has ended with an exit code."""
    phase = PodPhase.SUCCEEDED if exit_code == 0 else PodPhase.FAILED
    reason = {0: "Completed", None: None}.get(exit_code, "Error")
    return replace(
        pod, **({"phase": phase, "exit_code": exit_code, "reason": reason, "ready": False} | fields)
    )


def pending(pod: ObservedPod, reason: str | None = None, message: str | None = None) -> ObservedPod:
    """Return a pod that is not running yet, with the given reason."""
    return replace(pod, phase=PodPhase.PENDING, ready=False, reason=reason, message=message)


def describe(decided: Plan) -> list[str]:
    """Return a plan as lines of text: its status, conditions, actions, events and next look."""
    status = decided.status
    counts = (
        f"pservers {status.columns.pservers} trainers {status.columns.trainers}"
        if status.columns.pservers
        else f"trainers {status.columns.trainers}"
    )
    lines = [f"{status.state} {counts} restarts {status.restarts} failures {status.failures}"]
    lines += [f"{each.type} {each.status} {each.reason}: {each.message}" for each in status.conditions]
    lines += [_describe_action(action) for action in decided.actions]
    lines += [f"tell {event.type} {event.reason}: {event.message}" for event in decided.events]
    if decided.requeue_after is not None:
        lines.append(f"look again after {decided.requeue_after.total_seconds():g} s")
    return lines


def _describe_action(action: Action) -> str:
    match action:
        case CreateService(manifest):
            return f"create Service {manifest['metadata']['name']}"
        case CreatePod(manifest=manifest):
            metadata = manifest["metadata"]
            return f"create {metadata['name']} {metadata['labels']['fleetjob.dev/attempt']}"
        case DeletePod(name, uid, grace, version):
            within, at_version = f" within {grace} s", f" at version {version}"
            return f"delete {name} {uid.partition('@')[2]}" + (
                ("" if grace is None else within) + ("" if version is None else at_version)
            )
        case DeleteService(name):
            return f"delete Service {name}"
        case EnsureObject(manifest):
            return f"ensure {manifest['kind']} {manifest['metadata']['name']}"
        case DeleteObject(ref):
            return f"delete {ref.kind} {ref.name}"
        case DeleteJob():
            return "delete the job"


class Story:
    """A job whose status is carried over from one plan to the next, as in the engine.

    Each plan is made twice: once the status is written and nothing else has changed, the second plan must
    contain the same actions and no new events.
    """

    def __init__(self, document: dict[str, Any] | None = None, **spec: Any) -> None:
        if document and spec:
            raise TypeError("a story is of a whole document, or of the usual one with another spec")
        self.job: FleetJob = jobs.job(document or jobs.manifest(**spec))
        self.plan = Plan(self.job.status)

    def sees(self, *pods: ObservedPod, after: float = 0, service: bool = True, **observed: Any) -> list[str]:
        """Plan the job for the given pods; return the plan as text."""
        seen = Observed(pods, service, **{"unserved": NO_POLICIES, **observed})
        hosts, now = ClusterHosts(self.job), at(after)
        self.plan = plan(self.job, seen, now, hosts)
        self.job = self.job.with_status(self.plan.status)
        again = plan(self.job, seen, now, hosts)
        assert (again.status, again.actions, again.events) == (self.plan.status, self.plan.actions, ())
        return describe(self.plan)

    def scale(self, trainers: int) -> None:
        """Change the number of trainers, as a user or an autoscaler would."""
        trainer = self.job.spec.trainer.model_copy(update={"replicas": trainers})
        metadata = self.job.metadata.model_copy(update={"generation": self.job.metadata.generation + 1})
        spec = self.job.spec.model_copy(update={"trainer": trainer})
        self.job = self.job.model_copy(update={"spec": spec, "metadata": metadata})

    def label(self, **labels: str) -> None:
        """Change the job's labels but not its spec."""
        metadata = self.job.metadata.model_copy(update={"labels": labels})
        self.job = self.job.model_copy(update={"metadata": metadata})

    def edit(self, *, suspend: bool | None = None, **run_policy: Any) -> None:
        """Suspend or resume the job or change its run policy, as a user would."""
        spec = self.job.spec
        changes: dict[str, Any] = {"run_policy": spec.run_policy.model_copy(update=run_policy)}
        if suspend is not None:
            changes["suspend"] = suspend
        changed = spec.model_copy(update=changes)
        metadata = self.job.metadata.model_copy(update={"generation": self.job.metadata.generation + 1})
        self.job = self.job.model_copy(update={"spec": changed, "metadata": metadata})
