"""Validation rules that involve several fields: in CEL for the API server, in Python for the operator.

One table contains both forms with a common message, so ``fleetjob validate`` and the API server report the
same problems.

The API server also evaluates every rule on each status write, and the cost of selecting a field grows with
the number of fields in the enclosing object. So each rule is attached to the deepest field that contains
everything it needs, and first evaluates the condition that decides most jobs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fleet_operator.api.base import MAX_PORT
from fleet_operator.api.job import CheckpointScope, FailureAction, FleetJob, Mode, RuleAction, SyncMode
from fleet_operator.api.names import MAX_NAME_LENGTH, METRICS_PORT, NAME_PATTERN, Role
from fleet_operator.api.placement import Gang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fleet_operator.api.placement import PodGroupPolicy, PortRange

__all__ = [
    "CHANGES",
    "IMMUTABLE",
    "RULES",
    "ChangeRule",
    "Rule",
    "TransitionRule",
    "Validation",
    "name_problem",
]


class Validation(NamedTuple):
    """A validation rule for the API server."""

    node: str  # the field below spec to which it is attached, and which `self` denotes; empty for spec
    cel: str  # true if the object is valid
    field: str  # the field below spec that the error reports
    expected: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that a spec must satisfy."""

    field: str  # the field below spec that the error reports
    expected: str  # the message of both forms
    cel: str  # true if the spec is valid
    holds: Callable[[FleetJob], bool]  # the same condition in Python
    found: Callable[[FleetJob], str]
    nodes: tuple[str, ...] = ("",)  # the fields below spec that `self` denotes, one for each CEL rule

    def validations(self) -> Iterator[Validation]:
        """Yield the validation rules for the API server."""
        for node in self.nodes:
            field = self.field if _is_below(self.field, node) else node
            yield Validation(node, self.cel, field, self.expected)


@dataclass(frozen=True, slots=True)
class TransitionRule:
    """A rule that forbids changing a field of the spec, or only adding or removing the field."""

    field: str
    optional: bool  # whether the field may be absent: adding or removing it is a change, too
    contents: bool = True  # whether the content is immutable, not only the presence of the field

    @property
    def expected(self) -> str:
        """The error message of the API server."""
        return f"no change of spec.{self.field}: delete the job and create it again"

    def validations(self) -> Iterator[Validation]:
        """Yield the rules for the API server, which does not evaluate a rule on an absent field."""
        if self.contents:
            yield Validation(self.field, "self == oldSelf", self.field, self.expected)
        if self.optional:
            parent, _, name = self.field.rpartition(".")
            yield Validation(parent, f"has(self.{name}) == has(oldSelf.{name})", self.field, self.expected)


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """A rule that permits a change of a field of the spec only under a condition."""

    field: str
    expected: str
    cel: str  # true if the field is unchanged, or has an allowed value
    node: str = ""

    def validations(self) -> Iterator[Validation]:
        """Yield the validation rule for the API server."""
        yield Validation(self.node, self.cel, self.field, self.expected)


def _is_below(field: str, node: str) -> bool:
    return not node or field == node or field.startswith(f"{node}.")


def _what_runs(template: str) -> tuple[TransitionRule, TransitionRule, TransitionRule, TransitionRule]:
    """Return the rules that forbid adding or removing a template and changing its containers or volumes."""
    return (
        TransitionRule(template, optional=True, contents=False),
        TransitionRule(f"{template}.spec.containers", optional=False),
        TransitionRule(f"{template}.spec.initContainers", optional=True),
        TransitionRule(f"{template}.spec.volumes", optional=True),
    )


# A restarted pod is built from the current spec: after a change of the spec, the replicas of one job would
# differ. A suspended job has no pods, so where they run may change, as a queue needs that chooses among nodes
# (`_placed`), but not what they run. managedBy is immutable because the controller that it names has already
# started to manage the job.
IMMUTABLE = (
    TransitionRule("mode", optional=False),
    TransitionRule("pserver.replicas", optional=False),
    TransitionRule("pserver.port", optional=False),
    TransitionRule("pserver.disruptionBudget", optional=True),
    TransitionRule("trainer.port", optional=False),
    *_what_runs("template"),
    *_what_runs("pserver.template"),
    *_what_runs("trainer.template"),
    TransitionRule("trainer.nprocPerNode", optional=True),
    TransitionRule("trainer.minReplicas", optional=True),
    TransitionRule("trainer.maxReplicas", optional=True),
    TransitionRule("syncMode", optional=False),
    TransitionRule("failurePolicy", optional=False),
    TransitionRule("successPolicy", optional=False),
    TransitionRule("startupPolicy", optional=False),
    TransitionRule("trainer.devices", optional=True),
    TransitionRule("trainer.sharedMemory", optional=True),
    TransitionRule("podGroupPolicy", optional=True),
    TransitionRule("network", optional=True),
    TransitionRule("checkpoint", optional=True),
    TransitionRule("managedBy", optional=True),
)

_SERVERS_MAY_STAY = (
    "self.trainer.replicas == oldSelf.trainer.replicas || self.mode != 'ParameterServer' || self.suspend"
)


def _unchanged(field: str) -> str:
    """Return a CEL expression that is true if an optional field of the spec is unchanged."""
    parts = field.split(".")
    paths = [".".join(parts[: number + 1]) for number in range(len(parts))]
    there = [" && ".join(f"has({whose}.{path})" for path in paths) for whose in ("self", "oldSelf")]
    return f"({there[0]} ? {there[1]} && self.{field} == oldSelf.{field} : !({there[1]}))"


def _placed(field: str) -> ChangeRule:
    """Return a rule that lets a pod-placement field change only while the job has no pods."""
    return ChangeRule(
        field=field,
        expected=(
            f"no change of spec.{field} while the job runs, because its pods have been placed: set"
            " spec.suspend first"
        ),
        cel=f"{_unchanged(field)} || self.suspend || oldSelf.suspend",
    )


CHANGES = (
    _placed("template"),
    _placed("pserver.template"),
    _placed("trainer.template"),
    _placed("scheduling"),
    ChangeRule(
        field="trainer.replicas",
        expected=(
            "no change of spec.trainer.replicas: this job names no trainer.minReplicas and"
            " trainer.maxReplicas to move between, delete the job and create it again"
        ),
        cel="self.replicas == oldSelf.replicas || has(self.maxReplicas)",
        node="trainer",
    ),
    ChangeRule(
        field="trainer.replicas",
        expected=(
            "no change of spec.trainer.replicas while a job with syncMode Sync runs, because each step waits"
            " for every trainer: set spec.suspend first"
        ),
        cel=f"self.syncMode != 'Sync' || {_SERVERS_MAY_STAY}",
    ),
    ChangeRule(
        field="trainer.replicas",
        expected=(
            "no change of spec.trainer.replicas while a job with syncMode Geo runs, because what trainers"
            " send is divided by their number: set spec.suspend first"
        ),
        cel=f"self.syncMode != 'Geo' || {_SERVERS_MAY_STAY}",
    ),
    ChangeRule(
        field="trainer.replicas",
        expected=(
            "no change of spec.trainer.replicas while a job of mode ParameterServer runs that Kueue admits,"
            " because it admits a group of a fixed size: set spec.suspend first"
        ),
        cel=f"!has(self.podGroupPolicy) || !has(self.podGroupPolicy.kueue) || {_SERVERS_MAY_STAY}",
    ),
)


def name_problem(name: str) -> str | None:
    """Return the requirement that a job's name violates, or None if the name is valid."""
    if len(name) > MAX_NAME_LENGTH:
        return (
            f"at most {MAX_NAME_LENGTH} characters: names of pods are made of it (this one has {len(name)})"
        )
    if not re.fullmatch(NAME_PATTERN, name):
        return "lower case letters, digits and '-', with a letter first and no '-' last"
    return None


def _has_templates(job: FleetJob) -> bool:
    spec = job.spec
    own = spec.trainer.template is not None and (spec.pserver is None or spec.pserver.template is not None)
    return spec.template is not None or own


_NPROC_CEL = (
    "(self.mode != 'Collective' ? 1 : has(self.trainer.nprocPerNode) ? self.trainer.nprocPerNode :"
    " has(self.trainer.devices) ? self.trainer.devices.count : 1)"
)


_MANAGER = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"


_MOST_CEL = (
    "(has(self.trainer.maxReplicas) && self.trainer.maxReplicas > self.trainer.replicas ?"
    " self.trainer.maxReplicas : self.trainer.replicas)"
)


def _is_within_bounds(job: FleetJob) -> bool:
    trainer = job.spec.trainer
    if trainer.min_replicas is None or trainer.max_replicas is None:
        return True
    return trainer.min_replicas <= trainer.replicas <= trainer.max_replicas


def _ports_needed(job: FleetJob) -> int:
    return (job.replicas(Role.PSERVER) + job.most_trainers) * (job.nproc_per_node + 1)


def _ports_given(ports: PortRange) -> int:
    return ports.last - ports.first + 1


def _repeated_rules(job: FleetJob) -> list[str]:
    names = [rule.name for rule in job.spec.failure_policy.rules]
    return [name for index, name in enumerate(names) if name in names[:index]]


def _servers_to_keep(job: FleetJob) -> int:
    budget = job.spec.pserver.disruption_budget if job.spec.pserver is not None else None
    return (budget.min_available or 0) if budget is not None else 0


def _pod_groups(policy: PodGroupPolicy | None) -> list[str]:
    names = ("kueue", "coscheduling", "volcano")
    return [name for name in names if policy is not None and getattr(policy, name) is not None]


def _fits_in_the_job(name: str, gang: Gang) -> Rule:
    """Return the rule that limits a pod group's minMember to the number of the job's pods."""
    return Rule(
        field=f"podGroupPolicy.{name}.minMember",
        expected="at most as many pods as the job has",
        cel=(
            f"!has(self.podGroupPolicy) || !has(self.podGroupPolicy.{name}) ||"
            f" !has(self.podGroupPolicy.{name}.minMember) || self.podGroupPolicy.{name}.minMember <="
            " (has(self.pserver) ? self.pserver.replicas : 0) + self.trainer.replicas"
        ),
        holds=lambda job: job.gang is not gang or job.min_member <= job.num_replicas,
        found=lambda job: str(job.min_member),
    )


def _shares_the_nodes_network(job: FleetJob) -> bool:
    spec = job.spec
    templates = [spec.template, spec.trainer.template]
    if spec.pserver is not None:
        templates.append(spec.pserver.template)
    return any(each is not None and each.spec.host_network for each in templates)


RULES = (
    Rule(
        field="pserver",
        expected="parameter servers, because spec.mode is ParameterServer (without them it is Collective)",
        cel="self.mode != 'ParameterServer' || has(self.pserver)",
        holds=lambda job: job.spec.mode is not Mode.PARAMETER_SERVER or job.spec.pserver is not None,
        found=lambda _: "nothing",
    ),
    Rule(
        field="pserver",
        expected="nothing, because spec.mode is Collective (with parameter servers it is ParameterServer)",
        cel="self.mode != 'Collective' || !has(self.pserver)",
        holds=lambda job: job.spec.mode is not Mode.COLLECTIVE or job.spec.pserver is None,
        found=lambda _: "parameter servers",
    ),
    Rule(
        field="syncMode",
        expected="Sync, because trainers of a collective job exchange the gradients of every step",
        cel="self.mode != 'Collective' || self.syncMode == 'Sync'",
        holds=lambda job: job.spec.mode is not Mode.COLLECTIVE or job.spec.sync_mode is SyncMode.SYNC,
        found=lambda job: repr(job.spec.sync_mode.value),
    ),
    Rule(
        field="template",
        expected="a template for pods, shared by all roles, unless each role has its own",
        cel=(
            "has(self.template) ||"
            " (has(self.trainer.template) && (!has(self.pserver) || has(self.pserver.template)))"
        ),
        holds=_has_templates,
        found=lambda _: "nothing",
    ),
    Rule(
        field="trainer.nprocPerNode",
        expected="1, because a trainer of mode ParameterServer is one process",
        cel="!has(self.trainer.nprocPerNode) || self.trainer.nprocPerNode == 1 || self.mode == 'Collective'",
        holds=lambda job: job.spec.mode is Mode.COLLECTIVE or job.spec.trainer.nproc_per_node in (None, 1),
        found=lambda job: str(job.spec.trainer.nproc_per_node),
    ),
    Rule(
        field="trainer.maxReplicas",
        expected="trainer.minReplicas and trainer.maxReplicas together, or neither of them",
        cel="has(self.minReplicas) == has(self.maxReplicas)",
        nodes=("trainer",),
        holds=lambda job: (job.spec.trainer.min_replicas is None) == (job.spec.trainer.max_replicas is None),
        found=lambda job: "nothing" if job.spec.trainer.max_replicas is None else "no trainer.minReplicas",
    ),
    Rule(
        field="trainer.replicas",
        expected="a number from trainer.minReplicas to trainer.maxReplicas",
        cel=(
            "!has(self.minReplicas) || !has(self.maxReplicas) ||"
            " (self.minReplicas <= self.replicas && self.replicas <= self.maxReplicas)"
        ),
        nodes=("trainer",),
        holds=_is_within_bounds,
        found=lambda job: str(job.spec.trainer.replicas),
    ),
    Rule(
        field="trainer.port",
        expected=f"a port that leaves room for one port per process, up to {MAX_PORT}",
        cel=f"self.mode != 'Collective' || self.trainer.port + {_NPROC_CEL} - 1 <= {MAX_PORT}",
        holds=lambda job: job.spec.trainer.port + job.nproc_per_node - 1 <= MAX_PORT,
        found=lambda job: f"{job.spec.trainer.port} with {job.nproc_per_node} processes",
    ),
    Rule(
        field="trainer.port",
        expected=f"another port than {METRICS_PORT}, where each replica serves its metrics",
        cel=f"self != {METRICS_PORT}",
        nodes=("trainer.port",),
        holds=lambda job: job.spec.trainer.port != METRICS_PORT,
        found=lambda job: str(job.spec.trainer.port),
    ),
    Rule(
        field="pserver.port",
        expected=f"another port than {METRICS_PORT}, where each replica serves its metrics",
        cel=f"self != {METRICS_PORT}",
        nodes=("pserver.port",),
        holds=lambda job: job.spec.pserver is None or job.spec.pserver.port != METRICS_PORT,
        found=lambda _: str(METRICS_PORT),
    ),
    Rule(
        field="failurePolicy.action",
        expected="RestartJob or FailJob, because the processes of a collective job can only restart together",
        cel=(
            "self.mode != 'Collective' || !has(self.failurePolicy.action) ||"
            " self.failurePolicy.action != 'RestartReplica'"
        ),
        holds=lambda job: (
            job.spec.mode is not Mode.COLLECTIVE
            or job.spec.failure_policy.action is not FailureAction.RESTART_REPLICA
        ),
        found=lambda _: "'RestartReplica'",
    ),
    Rule(
        field="managedBy",
        expected="a controller as domain/name, such as kueue.x-k8s.io/multikueue",
        cel=f"self.matches('{_MANAGER}')",
        nodes=("managedBy",),
        holds=lambda job: (
            job.spec.managed_by is None or re.fullmatch(_MANAGER, job.spec.managed_by) is not None
        ),
        found=lambda job: repr(job.spec.managed_by),
    ),
    Rule(
        field="failurePolicy.rules",
        expected="rules that each say what they match: onExitCodes, onReasons, onMessagePatterns or role",
        cel=(
            "self.all(rule, has(rule.onExitCodes) || has(rule.onReasons) || has(rule.onMessagePatterns) ||"
            " has(rule.role))"
        ),
        nodes=("failurePolicy.rules",),
        holds=lambda job: all(
            rule.on_exit_codes or rule.on_reasons or rule.on_message_patterns or rule.role
            for rule in job.spec.failure_policy.rules
        ),
        found=lambda _: "a rule that matches everything",
    ),
    Rule(
        field="failurePolicy.rules",
        expected="rules with different names",
        cel="self.all(rule, self.exists_one(other, other.name == rule.name))",
        nodes=("failurePolicy.rules",),
        holds=lambda job: not _repeated_rules(job),
        found=lambda job: f"several rules named {_repeated_rules(job)[0]}",
    ),
    Rule(
        field="pserver.disruptionBudget.minAvailable",
        expected="at most as many servers as the job has",
        cel=(
            "!has(self.disruptionBudget) || !has(self.disruptionBudget.minAvailable) ||"
            " self.disruptionBudget.minAvailable <= self.replicas"
        ),
        nodes=("pserver",),
        holds=lambda job: _servers_to_keep(job) <= job.replicas(Role.PSERVER),
        found=lambda job: str(_servers_to_keep(job)),
    ),
    Rule(
        field="failurePolicy.rules",
        expected=(
            "RestartJob, FailJob or Ignore, because the processes of a collective job can only restart"
            " together"
        ),
        cel=(
            "self.mode != 'Collective' || self.failurePolicy.rules.all(rule, rule.action != 'RestartReplica')"
        ),
        holds=lambda job: (
            job.spec.mode is not Mode.COLLECTIVE
            or all(rule.action is not RuleAction.RESTART_REPLICA for rule in job.spec.failure_policy.rules)
        ),
        found=lambda _: "'RestartReplica'",
    ),
    Rule(
        field="network.portRange",
        expected="a range of ports, because hostNetwork lets replicas of one node share its ports",
        cel="!self.hostNetwork || has(self.portRange)",
        nodes=("network",),
        holds=lambda job: (
            job.spec.network is None
            or not job.spec.network.host_network
            or job.spec.network.port_range is not None
        ),
        found=lambda _: "nothing",
    ),
    Rule(
        field="network.portRange",
        expected=(
            "a port for the metrics and one for each process of every replica, trainer.maxReplicas included"
        ),
        cel=(
            "!has(self.network) || !self.network.hostNetwork || !has(self.network.portRange) ||"
            " self.network.portRange.last - self.network.portRange.first + 1 >="
            f" ((has(self.pserver) ? self.pserver.replicas : 0) + {_MOST_CEL}) * ({_NPROC_CEL} + 1)"
        ),
        holds=lambda job: job.host_ports is None or _ports_given(job.host_ports) >= _ports_needed(job),
        found=lambda job: (
            f"{job.host_ports.first} to {job.host_ports.last}, where {_ports_needed(job)} are needed"
            if job.host_ports
            else "nothing"
        ),
    ),
    Rule(
        field="network.tls",
        expected=(
            "nothing, because gloo, NCCL and torch's store, by which a collective job trains, do not support "
            "TLS: let the network encrypt, such as WireGuard in Cilium or Calico"
        ),
        cel="!has(self.network) || !has(self.network.tls) || self.mode != 'Collective'",
        holds=lambda job: job.tls is None or job.spec.mode is not Mode.COLLECTIVE,
        found=lambda job: f"the Secret {job.tls.secret_name}" if job.tls else "nothing",
    ),
    Rule(
        field="network.hostNetwork",
        expected="spec.network.hostNetwork with a portRange instead of hostNetwork in a template",
        cel="!has(self.hostNetwork) || !self.hostNetwork",
        nodes=("template.spec", "trainer.template.spec", "pserver.template.spec"),
        holds=lambda job: not _shares_the_nodes_network(job),
        found=lambda _: "hostNetwork in a template",
    ),
    Rule(
        field="podGroupPolicy",
        expected="exactly one of kueue, coscheduling and volcano",
        cel="[has(self.kueue), has(self.coscheduling), has(self.volcano)].exists_one(given, given)",
        nodes=("podGroupPolicy",),
        holds=lambda job: (
            job.spec.pod_group_policy is None or len(_pod_groups(job.spec.pod_group_policy)) == 1
        ),
        found=lambda job: " and ".join(_pod_groups(job.spec.pod_group_policy)) or "none of them",
    ),
    _fits_in_the_job("coscheduling", Gang.COSCHEDULING),
    _fits_in_the_job("volcano", Gang.VOLCANO),
    Rule(
        field="checkpoint",
        expected="either claimName or volumeClaimTemplate",
        cel="has(self.claimName) != has(self.volumeClaimTemplate)",
        nodes=("checkpoint",),
        holds=lambda job: (
            job.spec.checkpoint is None
            or (job.spec.checkpoint.claim_name is None) != (job.spec.checkpoint.volume_claim_template is None)
        ),
        found=lambda job: (
            "neither" if job.spec.checkpoint and job.spec.checkpoint.claim_name is None else "both"
        ),
    ),
    Rule(
        field="checkpoint.scope",
        expected="Job, because a job of mode Collective has no parameter servers",
        cel=(
            "!has(self.checkpoint) || !has(self.checkpoint.scope) || self.checkpoint.scope != 'Pserver' ||"
            " has(self.pserver)"
        ),
        holds=lambda job: (
            job.spec.checkpoint is None
            or job.spec.checkpoint.scope is not CheckpointScope.PSERVER
            or job.spec.pserver is not None
        ),
        found=lambda _: "'Pserver'",
    ),
)
