"""Whatever happens to the pods: what no sequence of events may ever bring about.

A machine of random events stands for the cluster: pods start, end, are deleted and disrupted, the operator
crashes between its actions, time passes. After any of it, a cluster that behaves well must bring the job to
its end.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet_operator.api import ConditionType, FleetJobStatus, Role, SuccessPolicyType
from fleet_operator.build import ClusterHosts
from fleet_operator.plan import plan
from fleet_operator.plan.formats import parse_indexes
from fleet_operator.plan.model import (
    Action,
    Attempt,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    DeleteService,
    Observed,
    ObservedPod,
    Plan,
    PodPhase,
)
from tests.support import jobs
from tests.support.plans import T0, ended

if TYPE_CHECKING:
    from collections.abc import Mapping

REPLICAS = 4
GRACE = timedelta(seconds=30)
picks = st.integers(0, REPLICAS - 1)


class Cluster(RuleBasedStateMachine):
    """One job, its pods, and a clock."""

    @initialize(
        policy=st.sampled_from(["RestartReplica", "RestartJob", "FailJob"]),
        success=st.sampled_from(list(SuccessPolicyType)),
        clean=st.sampled_from(["Running", "All", "None"]),
        startup=st.sampled_from(["InOrder", "AnyOrder"]),
        limit=st.integers(0, 3),
        sync=st.sampled_from(["Sync", "Async"]),
    )
    def create_job(
        self, policy: str, success: SuccessPolicyType, clean: str, startup: str, limit: int, sync: str
    ) -> None:
        self.job = jobs.job(
            jobs.manifest(
                syncMode=sync,
                trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 3},
                failurePolicy={"action": policy},
                successPolicy={"type": success.value},
                startupPolicy={"order": startup},
                runPolicy={"backoffLimit": limit, "cleanPodPolicy": clean},
            )
        )
        self.now, self.service, self.lives = T0, False, 0
        self.pods: dict[str, ObservedPod] = {}
        self.attempts: dict[str, Attempt] = {}  # the highest that has been seen of each name
        self.finished: FleetJobStatus | None = None

    # The operator.

    @rule(applied=st.integers(0, 6), refused=st.sampled_from([None, None, "exceeded quota: few"]))
    def operate(self, applied: int, refused: str | None) -> None:
        self.reconcile(applied, refused)

    def reconcile(self, applied: int = 99, refused: str | None = None) -> Plan:
        """Plan, write the status, and crash after some of the actions."""
        hosts = ClusterHosts(self.job)
        pods = tuple(self.pods.values())
        observed = Observed(pods, self.service, refused=refused, over_quota=refused is not None)
        for pod in self.pods.values():
            self.attempts[pod.name] = max(self.attempts.get(pod.name, Attempt()), pod.attempt)
        decided = plan(self.job, observed, self.now, hosts)
        assert decided.requeue_after is None or decided.requeue_after >= timedelta()
        written = FleetJobStatus.model_validate(decided.status.to_manifest())
        assert written == decided.status, "the status reads back as it was written"
        self.job = self.job.with_status(written)
        again = plan(self.job, observed, self.now, hosts)
        assert (again.status, again.actions, again.events) == (decided.status, decided.actions, ())
        assert again.requeue_after == decided.requeue_after, "nobody looks again because of an own status"
        for action in decided.actions[:applied]:
            self.apply(action)
        return decided

    def apply(self, action: Action) -> None:
        match action:
            case CreateService():
                assert not self.service
                self.service = True
            case DeleteService():
                self.service = False
            case CreatePod(manifest=manifest):
                self.create(manifest)
            case DeletePod(name, uid, grace):
                assert self.pods[name].uid == uid
                self.delete(name, at_once=grace == 0)
            case DeleteJob():
                raise AssertionError("no time to live was asked for")

    def create(self, manifest: Mapping[str, Any]) -> None:
        metadata = manifest["metadata"]
        labels, name = metadata["labels"], metadata["name"]
        assert name not in self.pods, "two pods of one name"
        assert self.service, "a pod before the names in its environment"
        assert not self.job.status.finished
        role, index = Role(labels["fleetjob.dev/role"]), int(labels["fleetjob.dev/index"])
        attempt = Attempt.parse(labels["fleetjob.dev/attempt"])
        assert name not in self.attempts or attempt > self.attempts[name], (
            "an older life has the same attempt"
        )
        completed = self.job.status.role(role).completed_indexes
        assert str(index) not in completed.replace("-", ","), "a completed replica was created again"
        self.lives += 1
        pod = ObservedPod(
            name, f"uid-{self.lives}", role, index, attempt, PodPhase.PENDING, container="fleet"
        )
        self.pods[name] = pod

    # What happens to pods.

    def delete(self, name: str, *, at_once: bool = False) -> None:
        pod = self.pods[name]
        if at_once or pod.phase is not PodPhase.RUNNING:
            del self.pods[name]
        elif pod.deleted_at is None:
            self.pods[name] = replace(pod, deleted_at=self.now + GRACE)

    def pick(self, index: int, *phases: PodPhase) -> ObservedPod | None:
        pods = sorted((pod for pod in self.pods.values() if pod.phase in phases), key=lambda pod: pod.name)
        return pods[index % len(pods)] if pods else None

    @precondition(lambda self: self.pods)
    @rule(index=picks, ready=st.booleans())
    def start(self, index: int, ready: bool) -> None:
        if pod := self.pick(index, PodPhase.PENDING):
            self.pods[pod.name] = replace(pod, phase=PodPhase.RUNNING, ready=ready)

    @precondition(lambda self: self.pods)
    @rule(index=picks)
    def become_ready(self, index: int) -> None:
        if pod := self.pick(index, PodPhase.RUNNING):
            self.pods[pod.name] = replace(pod, ready=not pod.ready)

    @precondition(lambda self: self.pods)
    @rule(index=picks, exit_code=st.sampled_from([0, 0, 0, 1, 2, 90, 91, 137, 143]))
    def end(self, index: int, exit_code: int) -> None:
        if pod := self.pick(index, PodPhase.RUNNING):
            self.pods[pod.name] = ended(pod, exit_code)

    @precondition(lambda self: self.pods)
    @rule(index=picks)
    def disrupt(self, index: int) -> None:
        if pod := self.pick(index, PodPhase.PENDING, PodPhase.RUNNING):
            self.pods[pod.name] = ended(pod, 137, disruption="EvictionByEvictionAPI")

    @precondition(lambda self: self.pods)
    @rule(index=picks, at_once=st.booleans())
    def somebody_deletes(self, index: int, at_once: bool) -> None:
        pod = self.pick(index, *PodPhase)
        if (
            pod and self.attempts.get(pod.name) == pod.attempt
        ):  # a pod that nobody has seen yet leaves no trace
            self.delete(pod.name, at_once=at_once)

    @precondition(lambda self: any(pod.deleted_at for pod in self.pods.values()))
    @rule(index=picks, exit_code=st.sampled_from([0, 143, None]))
    def terminate(self, index: int, exit_code: int | None) -> None:
        going = sorted((pod for pod in self.pods.values() if pod.deleted_at), key=lambda pod: pod.name)
        pod = going[index % len(going)]
        if exit_code is None:
            del self.pods[pod.name]
        elif pod.phase is PodPhase.RUNNING:
            self.pods[pod.name] = ended(pod, exit_code)

    @rule()
    def somebody_deletes_the_service(self) -> None:
        self.service = False

    @rule(seconds=st.sampled_from([0.3, 1, 20, 90]))
    def time_passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(suspend=st.booleans())
    def suspend_or_resume(self, suspend: bool) -> None:
        spec = self.job.spec.model_copy(update={"suspend": suspend})
        self.job = self.job.model_copy(update={"spec": spec})

    @rule(trainers=st.integers(1, 3))
    def scale(self, trainers: int) -> None:
        trainer = self.job.spec.trainer.model_copy(update={"replicas": trainers})
        spec = self.job.spec.model_copy(update={"trainer": trainer})
        self.job = self.job.model_copy(update={"spec": spec})

    # What must hold.

    @invariant()
    def the_end_is_final(self) -> None:
        status = self.job.status
        if self.finished is not None:
            assert status.state == self.finished.state
            assert status.conditions == self.finished.conditions
            assert (status.restarts, status.failures) == (self.finished.restarts, self.finished.failures)
        elif status.finished:
            self.finished = status

    @invariant()
    def success_and_failure_exclude_each_other(self) -> None:
        status = self.job.status
        assert status.is_true(ConditionType.COMPLETE) == (status.state == "Succeeded")
        assert status.is_true(ConditionType.FAILED) == (status.state == "Failed")

    @invariant()
    def every_condition_explains_itself(self) -> None:
        conditions = self.job.status.conditions
        assert len({each.type for each in conditions}) == len(conditions)
        for each in conditions:
            assert re.fullmatch("[A-Z][A-Za-z]+", each.reason)
            assert each.message
        explanation = self.job.status.explanation
        assert (explanation is None) == (self.job.status.state is None)

    @invariant()
    def failures_stay_within_the_limit(self) -> None:
        status = self.job.status
        assert status.failures <= self.job.spec.run_policy.backoff_limit or status.state == "Failed"
        assert status.job_restarts >= 0
        assert status.failures >= 0

    def teardown(self) -> None:
        """Let a cluster that behaves well bring the job to its end, and to rest."""
        if not hasattr(self, "job"):
            return
        self.suspend_or_resume(suspend=False)
        for _ in range(60):
            decided = self.reconcile()
            if self.job.status.finished and not decided.actions and decided.requeue_after is None:
                break
            self.now += decided.requeue_after or timedelta(seconds=1)
            for pod in list(self.pods.values()):
                if pod.deleted_at:
                    del self.pods[pod.name]
                elif pod.phase is PodPhase.PENDING:
                    self.pods[pod.name] = replace(pod, phase=PodPhase.RUNNING, ready=True)
                elif pod.phase is PodPhase.RUNNING and not pod.ready:
                    self.pods[pod.name] = replace(pod, ready=True)
                elif pod.phase is PodPhase.RUNNING and (pod.role is Role.TRAINER or self.job.status.finished):
                    self.pods[pod.name] = ended(pod, 0)
        assert self.job.status.finished, self.job.status
        self.the_end_is_final()


class Endings(RuleBasedStateMachine):
    """A job whose replicas tell the truth as they end, an operator that is away at times, and pods that go.

    Servers end well once every trainer has, and say so; a trainer knows of itself alone.
    """

    @initialize(
        policy=st.sampled_from(["RestartReplica", "RestartJob"]),
        sync=st.sampled_from(["Sync", "Async"]),
        keeps=st.booleans(),
    )
    def create_job(self, policy: str, sync: str, keeps: bool) -> None:
        spec: dict[str, Any] = {"syncMode": sync, "failurePolicy": {"action": policy}}
        if keeps:
            spec["checkpoint"] = {"mountPath": "/data", "claimName": "data"}
        self.job = jobs.job(jobs.manifest(**spec))
        self.now, self.lives, self.away = T0, 0, False
        self.pods: dict[str, ObservedPod] = {}
        self.departed: dict[str, ObservedPod] = {}
        self.done: set[str] = set()  # trainers that have completed with the servers that there are, by name
        for _ in range(3):
            self.operate()
            self.start()
        assert len(self.pods) == REPLICAS

    # The operator.

    @rule()
    def operate(self) -> None:
        known = self.known() & self.done
        observed = Observed((*self.pods.values(),), True, departed=(*self.departed.values(),))
        decided = plan(self.job, observed, self.now, ClusterHosts(self.job))
        begins_anew = decided.status.job_restarts > self.job.status.job_restarts
        self.job = self.job.with_status(FleetJobStatus.model_validate(decided.status.to_manifest()))
        assert begins_anew or known <= self.recorded(), "a completed replica is not recorded as such"
        assert len(known) < 2 or self.job.status.state == "Succeeded", "a finished job goes on"
        for action in decided.actions:
            if isinstance(action, CreatePod):
                self.create(action.manifest["metadata"])
            elif isinstance(action, DeletePod):
                self.delete(action.name)

    def known(self) -> set[str]:
        """Return the trainers of whom somebody who can be asked knows that they have completed."""
        known = self.recorded()
        for pod in (*self.pods.values(), *self.departed.values()):
            if pod.exit_code == 0 and pod.attempt.job == self.job.status.job_restarts:
                known |= {"digits-trainer-0", "digits-trainer-1"} if pod.role is Role.PSERVER else {pod.name}
        return known

    def recorded(self) -> set[str]:
        """Return the trainers that have completed as the status says."""
        trainers = self.job.status.role(Role.TRAINER)
        return {f"digits-trainer-{index}" for index in parse_indexes(trainers.completed_indexes)}

    def create(self, metadata: Mapping[str, Any]) -> None:
        labels, name = metadata["labels"], metadata["name"]
        role, index = Role(labels["fleetjob.dev/role"]), int(labels["fleetjob.dev/index"])
        attempt = Attempt.parse(labels["fleetjob.dev/attempt"])
        assert name not in self.recorded(), "a completed replica runs again"
        if attempt.job > self.life():
            self.done.clear()
        self.done.discard(name)
        self.lives += 1
        uid = f"uid-{self.lives}"
        self.pods[name] = ObservedPod(name, uid, role, index, attempt, PodPhase.PENDING, container="fleet")

    def life(self) -> int:
        """Return the life that the latest pods belong to."""
        pods = (*self.pods.values(), *self.departed.values())
        return max((pod.attempt.job for pod in pods), default=self.job.status.job_restarts)

    @rule(ending=st.integers(0, REPLICAS), deleted=st.lists(picks, max_size=REPLICAS))
    def operator_is_away(self, ending: int, deleted: list[int]) -> None:
        self.away = True
        self.departed.clear()
        self.start()
        self.the_rest_ends_well(ending)
        for index in deleted:
            if self.pods:
                self.somebody_deletes(index)
        self.away = False

    # What happens to pods.

    def delete(self, name: str) -> None:
        pod = self.pods.pop(name)
        if not self.away:
            self.departed[name] = pod

    @precondition(lambda self: self.pods)
    @rule(index=picks)
    def somebody_deletes(self, index: int) -> None:
        self.delete(sorted(self.pods)[index % len(self.pods)])

    @rule()
    def start(self) -> None:
        for name, pod in self.pods.items():
            if pod.phase is PodPhase.PENDING:
                self.pods[name] = replace(pod, phase=PodPhase.RUNNING, ready=True)

    @precondition(lambda self: self.pods)
    @rule(index=picks, exit_code=st.sampled_from([0, 0, 0, 0, 1]))
    def end(self, index: int, exit_code: int) -> None:
        self.let_end(sorted(self.pods)[index % len(self.pods)], exit_code)

    @rule(first=st.integers(0, 2))
    def the_rest_ends_well(self, first: int) -> None:
        for name in sorted(self.pods, reverse=True)[:first]:  # trainers before servers
            self.let_end(name, 0)

    def let_end(self, name: str, exit_code: int) -> None:
        pod, all_done = self.pods[name], len(self.done) == 2
        well = exit_code == 0 and (pod.role is Role.TRAINER or all_done)
        if pod.phase is not PodPhase.RUNNING or (exit_code == 0 and not well):
            return
        if pod.role is Role.TRAINER and well:
            self.done.add(name)
        words = f'{{"joined":true,"completedTrainers":"{"0-1" if pod.role is Role.PSERVER else pod.index}"}}'
        self.pods[name] = ended(pod, exit_code, message=words if well else None)

    @rule(seconds=st.sampled_from([1, 20, 90]))
    def time_passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


TestEndings = Endings.TestCase
TestEndings.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
