"""Finds the failures of replicas, classifies them, and describes them in sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING

from fleet_operator.api import Gang, LastFailure, Mode, Role
from fleet_operator.plan.decide.run_policy import not_running_since
from fleet_operator.plan.formats import format_indexes, stamp
from fleet_operator.plan.model import Attempt, Event
from fleet_operator.plan.observe.attempts import INCIDENT
from fleet_operator.plan.observe.pods import (
    EXIT_PEER_LOST,
    has_failed,
    has_succeeded,
    is_on_silent_node,
    silent_since,
)
from fleet_operator.plan.observe.termination_message import (
    NEVER_RAN,
    is_repeated,
    last_sentence,
    parse_words,
    permanent_error,
    raised_at,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import ObservedPod
    from fleet_operator.plan.observe.attempts import Replica
    from fleet_operator.plan.observe.context import Context

__all__ = [
    "EXIT_BAD_CONFIGURATION",
    "EXIT_STATE_LOST",
    "VANISHED",
    "Failure",
    "Kind",
    "failure_events",
    "failure_sentence",
    "find_failures",
    "is_deactivated",
    "loses_parameters",
]

EXIT_BAD_CONFIGURATION = 2  # shells, argparse and python also exit with it after wrong arguments
EXIT_STATE_LOST = 90
VANISHED = "PodsVanished"
"""The reason for a pod that is gone, and whose end was neither observed nor reported by another pod."""

_SIGNALS = {
    129: "SIGHUP",
    130: "SIGINT",
    132: "SIGILL",
    134: "SIGABRT",
    135: "SIGBUS",
    136: "SIGFPE",
    137: "SIGKILL",
    139: "SIGSEGV",
    143: "SIGTERM",
}
_NO_RANK = "environment variable RANK expected, but not set"  # a message of torch.distributed
_NO_RANK_IN_SLOTS = re.compile(r"\bKeyError: '(?:LOCAL_)?RANK'")  # of a script that reads os.environ
_WHO_GIVES_RANKS = (
    "; a pod has RANK only in mode Collective with trainer.nprocPerNode 1: with more write"
    " command: [torchrun, SCRIPT] or [python, -m, fleet.launch, SCRIPT], which give each process its rank"
)
_MESSAGE_CHARACTERS = 1024  # the limit of a termination message in the status; it may be a log's end
_EARLY = timedelta(minutes=1)
_MOST_EVENTS = 10  # of one pass; further failures share one event
EVICTED = "Evicted"
UNADMITTED = "UnexpectedAdmissionError"
"""The kubelet's reason for rejecting a pod whose node lacks a device that the scheduler expected."""

# Reasons of pods that a node or the control plane ended, without a DisruptionTarget condition. Evicted is not
# one of them: under resource pressure the node sets the condition.
_DISRUPTIVE = frozenset(
    {"NodeAffinity", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated", UNADMITTED}
)
_REFUSALS = frozenset({"NodeAffinity", UNADMITTED})
_OUT_OF = "OutOf"  # such as OutOfcpu
_DEACTIVATED = "The workload is deactivated"  # Kueue continues with the cause, if it was Kueue's own decision


class Kind(Enum):
    """A kind of failure, which determines whether a retry can help."""

    ORDINARY = auto()  # retryable
    BAD_CONFIGURATION = auto()  # found before any work: a retry fails the same way
    PERMANENT = auto()  # the script cannot run: a retry fails the same way
    REPEATED = auto()  # on one machine: the same exception at the same line as before, without any step
    STATE_LOST = auto()  # the replica cannot continue alone: all replicas must restart
    STARTING = auto()  # it gave up waiting for peers that have not run yet
    DISRUPTION = auto()  # not caused by the job


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a replica, whose pod must be replaced."""

    replica: Replica
    kind: Kind
    record: LastFailure
    reasons: frozenset[str] = frozenset()  # the reasons that rules can match
    by_main: bool = True  # whether the main container is the one that ended
    message: str = ""  # the whole termination message, which rules can match
    follows: bool = False  # whether it is a consequence of a disruption or of a counted failure

    @property
    def counts(self) -> bool:
        """True if the failure counts against runPolicy.backoffLimit, unless a rule ignores it."""
        return self.kind not in (Kind.DISRUPTION, Kind.STARTING) and not self.follows

    @property
    def exit_code(self) -> int | None:
        """The exit code of the main container, or None if it did not end."""
        return self.record.exit_code if self.by_main else None

    @property
    def prolongs_pause(self) -> bool:
        """True if the failure lengthens the pause before the next start.

        A pod that its node refuses would otherwise be created and refused repeatedly.
        """
        refused = any(each in _REFUSALS or each.startswith(_OUT_OF) for each in self.reasons)
        return self.counts or (refused and self.record.exit_code is None)

    @property
    def unadmitted(self) -> bool:
        """True if the pod's node did not admit it, for example because it lacked a device."""
        return UNADMITTED in self.reasons

    @property
    def by_peer(self) -> bool:
        """True if the replica ended because a peer had failed or become silent."""
        return self.exit_code in (EXIT_STATE_LOST, EXIT_PEER_LOST)

    @property
    def event(self) -> str:
        """The reason in the Kubernetes event about the failure."""
        if VANISHED in self.reasons:
            return VANISHED
        return "ReplicaDisrupted" if self.kind is Kind.DISRUPTION else "ReplicaFailed"


def find_failures(context: Context) -> tuple[Failure, ...]:
    """Return the failures of the replicas' current pods, ordered by replica.

    A pod on a silent node counts as lost immediately if its peers treat it as lost. Otherwise, they would
    wait for the pod again.
    """
    found = (_find_failure(context, replica) for replica in context.replicas.wanted)
    failures = [failure for failure in found if failure is not None]
    if not failures:
        return ()
    disturbed = _disturbed(context)
    failures = [replace(each, follows=_follows(context, each, disturbed)) for each in failures]
    if any(each.follows and each.exit_code == EXIT_PEER_LOST for each in failures):
        known = {each.replica for each in failures}
        failures += [
            _lost(context, replica, context.replicas.present[replica])
            for replica in context.silent_nodes
            if replica not in known and context.replicas.present[replica].deleted_at is None
        ]
        failures.sort(key=lambda each: each.replica)
    return tuple(failures)


def failure_events(failures: Sequence[Failure]) -> tuple[Event, ...]:
    """Return the events about failures; beyond a limit, the rest share one event.

    All trainers of a collective job end together, and 1,000 events would delay its restart. Failures that are
    not consequences of others have events of their own first.
    """
    shown = sorted(failures, key=lambda each: each.follows or each.by_peer)[:_MOST_EVENTS]
    events = [
        Event("Warning", each.event, each.record.message)
        for each in sorted(shown, key=lambda each: each.replica)
    ]
    rest = {each.replica: each for each in failures if each not in shown}
    if rest:
        indexes = ((role, [each.index for each in rest if each.role is role]) for role in Role)
        names = ", ".join(f"{role.value} {format_indexes(each)}" for role, each in indexes if each)
        sentence = f"{len(rest)} more replicas ended: {names}"
        events.append(Event("Warning", next(iter(rest.values())).event, sentence))
    return tuple(events)


def loses_parameters(context: Context, failures: Sequence[Failure]) -> bool:
    """Return whether the end of a server destroyed parameters that trainers still need.

    Each of these trainers would end with exit code 90 once it connected to the next server, so there is no
    need to wait for that. With a checkpoint, the next server continues from it, or reports that it cannot.
    """
    if context.job.keeps_parameters:
        return False
    trainers = (each for each in context.replicas.wanted if each.role is Role.TRAINER)
    any_started = any(context.replicas.has_started(each) for each in trainers)
    return any_started and any(each.replica.role is Role.PSERVER for each in failures)


def _find_failure(context: Context, replica: Replica) -> Failure | None:
    now, pod = context.now, context.replicas.present.get(replica)
    if context.replicas.has_vanished(replica):
        return _gone(context, replica)
    if pod is None or replica in context.replicas.stranded or context.ledger.has_completed(replica):
        return None  # the failure that stranded it has already been handled
    reasons = _reasons_of(pod)
    given_up = context.silent_nodes.get(replica)
    if given_up is not None and now >= given_up:
        return _lost(context, replica, pod)
    if has_failed(pod):
        main = context.job.template(replica.role).main_container.name
        by_main = pod.container in (None, main)
        again = pod.reason == UNADMITTED and replica.index in context.ledger.roles[replica.role].refused
        record = _tell(pod, failure_sentence(pod, context.job, refused_again=again), now)
        kind = _kind(pod, main, refused_again=again)
        if kind is Kind.ORDINARY and by_main and _gave_up_starting(context, replica, pod):
            kind = Kind.STARTING
        elif kind is Kind.ORDINARY and by_main and _is_permanent(context, replica, pod):
            kind = Kind.PERMANENT
        elif kind is Kind.ORDINARY and by_main and _is_repeated_here(context, replica, pod):
            kind = Kind.REPEATED
        return Failure(replica, kind, record, reasons, by_main, pod.message or "")
    if has_succeeded(pod) and not context.ledger.has_completed(replica):
        sentence = (
            f"{pod.name} ended with exit code 0 before every trainer had started;"
            " a parameter server must serve until all trainers have completed"
        )
        return Failure(replica, Kind.ORDINARY, _tell(pod, sentence, now), reasons)
    return None


def _gone(context: Context, replica: Replica) -> Failure:
    """Return the failure of a replica whose pod is gone and whose end was not observed."""
    name, last = context.replicas.name_of(replica), context.replicas.departed.get(replica)
    if last is not None and last.disruption:
        # What evicts a pod marks it first, and the mark and the deletion may be observed in the same pass.
        record = _tell(last, failure_sentence(last, context.job), context.now)
        main = context.job.template(replica.role).main_container.name
        by_main = last.container in (None, main)
        reasons = _reasons_of(last) | {"Deleted"}
        return Failure(replica, Kind.DISRUPTION, record, reasons, by_main, last.message or "")
    reason, sentence, reasons = "Deleted", f"{name} was deleted", frozenset({"Deleted"})
    if last is None:
        reason, sentence = VANISHED, f"{name} is gone, and nobody has seen how it ended"
        reasons |= {VANISHED}
    record = LastFailure(pod=name, reason=reason, message=sentence, time=stamp(context.now))
    return Failure(replica, Kind.DISRUPTION, record, reasons)


def _reasons_of(pod: ObservedPod) -> frozenset[str]:
    """Return the reasons of a pod's end that rules can match."""
    return frozenset(each for each in (pod.reason, pod.disruption) if each is not None)


def _lost(context: Context, replica: Replica, pod: ObservedPod) -> Failure:
    sentence = f"{pod.name} is lost: its node {pod.node} has been {silent_since(pod)}"
    record = _tell(pod, sentence, context.now).model_copy(update={"reason": "NodeLost"})
    return Failure(replica, Kind.DISRUPTION, record, frozenset({"NodeLost"}))


def _follows(context: Context, failure: Failure, disturbed: frozenset[Replica]) -> bool:
    """Return whether a failure is a consequence of a disruption or of an already counted failure.

    A trainer that outlives its server ends with exit code 90 once it connects to the next one. A replica ends
    with 91 if its peer is evicted, or is on a silent node. In a collective job, all replicas end with the
    first. On an overloaded host, replicas treat each other as lost one after the other.
    """
    if failure.kind in (Kind.DISRUPTION, Kind.STARTING):
        return False
    if failure.kind is Kind.STATE_LOST and _outlived_a_server(context, failure.replica):
        return True
    if failure.by_peer and _is_of_the_last_incident(context, failure):
        return True
    if not failure.by_peer and context.job.spec.mode is not Mode.COLLECTIVE:
        return False
    return any(each != failure.replica for each in disturbed)


def _disturbed(context: Context) -> frozenset[Replica]:
    """Return the replicas whose pods are being deleted or evicted or are gone, or whose node is silent."""
    pods = context.replicas.present.items()
    disturbed = {each for each, pod in pods if pod.disruption or pod.deleted_at or is_on_silent_node(pod)}
    vanished = (each for each in context.replicas.wanted if context.replicas.has_vanished(each))
    return frozenset(disturbed.union(vanished))


def _is_of_the_last_incident(context: Context, failure: Failure) -> bool:
    """Return whether a replica ended because it lost a peer in the previous incident.

    The replicas whose own failures belong to the incident are in the ledger, and are left out here.
    """
    before = context.job.status.last_failure
    if before is None or before.time is None or failure.record.time is None:
        return False
    if failure.replica in context.failed_in_incident:
        return False
    return _was_there(context, failure.replica) and failure.record.time <= before.time + INCIDENT


def _was_there(context: Context, replica: Replica) -> bool:
    """Return whether a replica's pod is older than the pod that replaced the last failed one.

    Both times come from the API server. The time of the failure itself comes from the clock of a node, which
    may be off by some seconds. After a failure that restarted the whole job, no such pod is left.
    """
    replicas, born = context.replicas, context.replicas.present[replica].created_at
    failed = context.last_failed
    if failed is None or born is None or not context.ledger.is_replaced(failed):
        return False
    successor = replicas.present.get(failed)
    return successor is None or (successor.created_at is not None and born < successor.created_at)


def _outlived_a_server(context: Context, trainer: Replica) -> bool:
    """Return whether a server was replaced after this trainer's pod was created."""
    born = context.replicas.present[trainer].created_at
    latest, any_missing = context.servers_replaced_at
    return any_missing or (born is not None and latest is not None and latest > born)


def _kind(pod: ObservedPod, main: str, *, refused_again: bool) -> Kind:
    """Return the kind of a failure; exit codes have a defined meaning only for the main container."""
    if _is_disrupted(pod, refused_again=refused_again):
        return Kind.DISRUPTION
    if pod.reason == EVICTED or pod.container not in (None, main):
        return Kind.ORDINARY
    if pod.exit_code == EXIT_BAD_CONFIGURATION and _ended_before_work(pod):
        return Kind.BAD_CONFIGURATION
    return Kind.STATE_LOST if pod.exit_code == EXIT_STATE_LOST else Kind.ORDINARY


def _is_disrupted(pod: ObservedPod, *, refused_again: bool) -> bool:
    """Return whether a pod was ended from outside, which an end by SIGTERM alone does not show.

    A node that cannot provide a device may just have lost it, so its first refusal is a disruption. If the
    same replica is refused again, further pods will be refused, too.
    """
    return bool(pod.disruption or pod.deleted_at or (_ended_by_node(pod) and not refused_again))


def is_deactivated(context: Context) -> bool:
    """Return whether Kueue stopped the job because its Workload was deactivated (``active: false``).

    The message of the pods' condition TerminationTarget says so. If no pods are left, the Workload says so
    while it exists.
    """
    if context.job.gang is not Gang.KUEUE:
        return False
    if context.observed.deactivated:
        return True
    pods = (*context.replicas.present.values(), *context.replicas.departed.values())
    return any((pod.disruption_message or "").startswith(_DEACTIVATED) for pod in pods)


def _ended_before_work(pod: ObservedPod) -> bool:
    """Return whether a replica ended before joining its job.

    The termination message reports it. Without a runtime, a script that ends within a minute counts as not
    joined: argparse and shells exit with this code after wrong arguments, but other programs may use it for
    any reason.
    """
    joined = parse_words(pod.message).joined
    if joined is not None:
        return not joined
    if pod.started_at is None or pod.finished_at is None:
        return True
    return pod.finished_at - pod.started_at <= _EARLY


def _gave_up_starting(context: Context, replica: Replica, pod: ObservedPod) -> bool:
    """Return whether a replica gave up because its peers had not started."""
    began = not_running_since(context.job.status)
    patience = timedelta(seconds=context.job.start_deadline_seconds)
    if pod.exit_code != EXIT_PEER_LOST or began is None or context.now >= began + patience:
        return False
    return any(each != replica for each in context.replicas.unbegun)


def _is_permanent(context: Context, replica: Replica, pod: ObservedPod) -> bool:
    """Return whether a replica's script can never run, so that retries are useless.

    On one machine, the first failure is conclusive. On a cluster, only a repetition is conclusive: a retry
    may run on another node, with another image of the same name, or with another file system.
    """
    one_machine = context.observed.one_machine
    if not one_machine and context.ledger.attempt(replica) == Attempt():
        return False
    error = permanent_error(pod.exit_code, pod.reason, pod.message)
    if error is None or one_machine:
        return error is not None
    return is_repeated(error, pod.exit_code, context.job.status.last_failure)


def _is_repeated_here(context: Context, replica: Replica, pod: ObservedPod) -> bool:
    """Return whether a local replica failed twice before its first step with the same error.

    Without a runtime that counts steps, a run of up to a minute counts as a run without steps.
    """
    before = context.job.status.last_failure
    if not context.observed.one_machine or before is None or pod.exit_code == EXIT_PEER_LOST:
        return False
    if context.ledger.attempt(replica) == Attempt() or parse_words(before.termination_message).stepped:
        return False
    stepped = parse_words(pod.message).stepped
    if stepped or (stepped is None and not _ended_before_work(pod)):
        return False
    raised = raised_at(pod.message)
    return raised is not None and raised == raised_at(before.termination_message)


def _ended_by_node(pod: ObservedPod) -> bool:
    """Return whether the node ended or rejected the pod, for example with OutOfcpu."""
    reason = pod.reason or ""
    return reason in _DISRUPTIVE or (pod.exit_code is None and reason.startswith(_OUT_OF))


def _tell(pod: ObservedPod, sentence: str, now: datetime) -> LastFailure:
    return LastFailure(
        pod=pod.name,
        container=pod.container,
        exit_code=pod.exit_code,
        reason=pod.reason,
        termination_message=pod.message[-_MESSAGE_CHARACTERS:] if pod.message else None,
        message=sentence,
        time=stamp(pod.finished_at or now),
    )


def failure_sentence(pod: ObservedPod, job: FleetJob, *, refused_again: bool = False) -> str:
    """Return a sentence about a failed pod, used in statuses and by local runs.

    Parameters
    ----------
    pod : ObservedPod
        The pod, with the name to display.
    job : FleetJob
        Its job.
    refused_again : bool
        Whether a node also refused the replica's previous pod.
    """
    code, main = pod.exit_code, job.template(pod.role).main_container.name
    said = last_sentence(pod.message, with_place=True)
    because = f": {said}" if said else ""
    if _NO_RANK in said or (job.nproc_per_node > 1 and _NO_RANK_IN_SLOTS.search(said)):
        because += _WHO_GIVES_RANKS
    if _is_disrupted(pod, refused_again=refused_again):
        cause = pod.disruption or ("it was deleted" if pod.deleted_at else pod.reason)
        if pod.disruption_message:
            cause = f"{cause}: {pod.disruption_message.rstrip('.')}"
        return f"{pod.name} was disrupted ({cause}){because}"
    if pod.reason == EVICTED:
        return f"{pod.name} was evicted by its node for a limit of its own (Evicted){because}"
    if code is None or pod.reason in NEVER_RAN:
        return f"{pod.name} could not run ({pod.reason or 'no reason given'}){because}"
    if pod.reason == "OOMKilled":
        return f"{pod.name} ran out of memory (OOMKilled); container {pod.container} needs a higher limit"
    if pod.container not in (None, main):
        return f"{pod.name} failed with exit code {code} in container {pod.container}{because}"
    if code == EXIT_BAD_CONFIGURATION and _ended_before_work(pod):
        return f"{pod.name} refused its configuration (exit code 2){because}"
    if code == EXIT_STATE_LOST:
        return f"{pod.name} found that a parameter server had lost its state (exit code 90){because}"
    if code == EXIT_PEER_LOST:
        return f"{pod.name} lost a peer for good (exit code 91){because}"
    if code in _SIGNALS:
        return f"{pod.name} was ended by {_SIGNALS[code]} (exit code {code}){because}"
    return f"{pod.name} failed with exit code {code}{because}"
