"""A table of job behaviours that Kubernetes clusters and local runs must share.

A case gives the exit codes of its replicas and the result of the job. On a cluster, kwok ends the pods; on
this machine, each replica runs the script `LIFE`. Features that only a cluster has are in
`tests.support.cluster_only`; the two tables together cover every policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BEHAVIOURS", "LATE", "LIFE", "MUTE", "NEVER", "Behaviour", "exit_code_of", "is_pause"]

NEVER, LATE, MUTE = -1, -2, -3
"""Used instead of exit codes: a life that never ends by itself, a life that ends after all others, and the
life of a server that never becomes ready."""


@dataclass(frozen=True)
class Behaviour:
    """A test case: a job, with two servers and two trainers or only two trainers, and its expected result.

    Attributes
    ----------
    lives : mapping
        By replica, such as ``trainer-1``, the exit codes of its lives; the last one repeats. A replica that
        is not named does not fail: a server serves, and a trainer completes after all failures.
    spec : mapping
        Further fields of the job's spec.
    state, reason : str
        The final state of the job, and the reason in its condition.
    failures, job_restarts : int
        The counts in its final status.
    says : str
        A part of the condition's message.
    pause_seconds : float, optional
        The pause before the last restart of a replica.
    first : int, optional
        The number of trainers that start before the servers are ready; the servers then become ready late.
    left : frozenset of str, optional
        The replicas whose pods still exist at the end.
    """

    id: str
    lives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    state: str = "Succeeded"
    reason: str = "TrainersCompleted"
    failures: int = 0
    job_restarts: int = 0
    collective: bool = False
    says: str = ""
    pause_seconds: float | None = None
    first: int | None = None
    left: frozenset[str] | None = None

    @property
    def slow_servers(self) -> bool:
        """True if the servers become ready only some time after they start running."""
        return self.first is not None or any(MUTE in codes for codes in self.lives.values())


def _rules(*rules: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return {"failurePolicy": {**policy, "rules": list(rules)}}


def _fails_with(policy: str, *left: str) -> Behaviour:
    """Return a test case of a job that fails while three replicas run; only the pods in `left` remain."""
    return Behaviour(
        f"a-job-that-has-failed-leaves-what-cleanPodPolicy-{policy}-says",
        {"pserver-0": (NEVER,), "pserver-1": (NEVER,), "trainer-0": (NEVER,), "trainer-1": (1,)},
        {"failurePolicy": {"action": "FailJob"}, "runPolicy": {"cleanPodPolicy": policy}},
        state="Failed",
        reason="ReplicaFailed",
        failures=1,
        left=frozenset(left),
    )


BEHAVIOURS = (
    Behaviour("a-job-whose-trainers-complete-succeeds"),
    Behaviour(
        "a-failed-trainer-restarts-alone-after-a-pause", {"trainer-1": (1, 0)}, failures=1, pause_seconds=1
    ),
    Behaviour(
        "a-trainer-that-fails-again-pauses-longer",
        {"trainer-1": (1, 1, 0)},
        {"failurePolicy": {"action": "RestartReplica"}},
        failures=2,
        pause_seconds=2,
    ),
    Behaviour(
        "trainers-that-fail-within-a-minute-are-one-failure",
        {"trainer-0": (1, 0), "trainer-1": (1, 0)},
        {"failurePolicy": {"action": "RestartReplica"}, "runPolicy": {"backoffLimit": 1}},
        failures=1,
    ),
    Behaviour(
        "a-policy-that-restarts-jobs-restarts-everybody",
        {"trainer-1": (1, 0)},
        {"failurePolicy": {"action": "RestartJob"}},
        failures=1,
        job_restarts=1,
    ),
    Behaviour(
        "under-kueue-a-failed-trainer-restarts-everybody-whatever-the-policy",
        {"trainer-1": (1, 0)},
        {
            "podGroupPolicy": {"kueue": {"queueName": "research"}},
            "failurePolicy": {"action": "RestartReplica"},
        },
        failures=1,
        job_restarts=1,
    ),
    Behaviour(
        "all-trainers-must-complete",
        spec={"successPolicy": {"type": "All"}},
        says="all 2 trainers have completed",
    ),
    Behaviour(
        "any-trainer-that-completes-is-enough",
        {"trainer-0": (LATE,)},
        {"successPolicy": {"type": "Any"}},
        says="trainer 1 has completed",
    ),
    Behaviour(
        "trainers-wait-for-the-servers-to-be-ready", spec={"startupPolicy": {"order": "InOrder"}}, first=0
    ),
    Behaviour("all-replicas-start-at-once", spec={"startupPolicy": {"order": "AnyOrder"}}, first=2),
    Behaviour(
        "a-job-that-does-not-get-to-run-in-time-fails-and-says-what-it-waited-for",
        {"pserver-0": (MUTE,)},
        {"runPolicy": {"pendingDeadlineSeconds": 2}, "startupPolicy": {"order": "InOrder"}},
        state="Failed",
        reason="PendingDeadlineExceeded",
        says="trainers are created once all parameter servers are ready",
    ),
    _fails_with("Running", "trainer-1"),
    _fails_with("All"),
    _fails_with("None", "pserver-0", "pserver-1", "trainer-0", "trainer-1"),
    Behaviour(
        "a-server-that-fails-takes-the-parameters-along-and-counts-once",
        {"pserver-0": (1, 0)},
        failures=1,
        job_restarts=1,
    ),
    Behaviour(
        "a-collective-job-restarts-together",
        {"trainer-1": (1, 0)},
        failures=1,
        job_restarts=1,
        collective=True,
    ),
    Behaviour(
        "one-failure-more-than-the-limit-fails-the-job",
        {"trainer-0": (1,)},
        {"runPolicy": {"backoffLimit": 1}},
        state="Failed",
        reason="BackoffLimitExceeded",
        failures=2,
    ),
    Behaviour(
        "a-refused-configuration-is-not-tried-again",
        {"trainer-0": (2,)},
        state="Failed",
        reason="BadConfiguration",
        failures=1,
    ),
    Behaviour(
        "a-rule-restarts-the-whole-job",
        {"trainer-1": (42, 0)},
        _rules(
            {
                "name": "codes-restartjob",
                "onExitCodes": {"operator": "In", "values": [42]},
                "action": "RestartJob",
            }
        ),
        failures=1,
        job_restarts=1,
    ),
    Behaviour(
        "a-rule-fails-the-job-at-once",
        {"trainer-1": (42,)},
        _rules({"name": "reasons-failjob", "onReasons": ["Error"], "role": "trainer", "action": "FailJob"}),
        state="Failed",
        reason="ReplicaFailed",
        failures=1,
    ),
    Behaviour(
        "a-rule-is-about-any-exit-code-but-some",
        {"trainer-1": (42,)},
        _rules(
            {
                "name": "unknown",
                "onExitCodes": {"operator": "NotIn", "values": [1]},
                "role": "trainer",
                "action": "FailJob",
            }
        ),
        state="Failed",
        reason="ReplicaFailed",
        failures=1,
    ),
    Behaviour(
        "a-pattern-that-no-message-has-decides-nothing-and-a-failure-is-no-disruption",
        {"trainer-1": (1, 0)},
        _rules(
            {"name": "gpu", "onMessagePatterns": ["CUDA error*ECC"], "action": "FailJob"}, disruptionLimit=0
        ),
        failures=1,
    ),
    Behaviour(
        "an-ignored-exit-code-counts-as-no-failure",
        {"trainer-1": (42, 0)},
        _rules(
            {"name": "codes-ignore", "onExitCodes": {"operator": "In", "values": [42]}, "action": "Ignore"},
            action="FailJob",
        ),
    ),
    Behaviour(
        "the-first-rule-that-matches-decides",
        {"trainer-1": (42, 0)},
        _rules(
            {"name": "pserver-failjob", "role": "pserver", "action": "FailJob"},
            {
                "name": "codes-restartreplica",
                "onExitCodes": {"operator": "In", "values": [42]},
                "action": "RestartReplica",
            },
            {"name": "trainer-failjob", "role": "trainer", "action": "FailJob"},
        ),
        failures=1,
    ),
    Behaviour(
        "a-job-that-takes-too-long-fails",
        {"trainer-1": (NEVER,)},
        {"runPolicy": {"activeDeadlineSeconds": 2}},
        state="Failed",
        reason="DeadlineExceeded",
    ),
    Behaviour(
        "trainers-that-have-no-vote-do-not-hold-a-success-up",
        {"trainer-1": (LATE,)},
        {"successPolicy": {"type": "RankZero"}},
        says="trainer 0 has completed",
    ),
    Behaviour(
        "what-says-how-pods-are-reached-changes-nothing-of-what-they-do",
        {"trainer-0": (1, 0)},
        {
            "network": {
                "hostNetwork": True,
                "portRange": {"first": 22000, "last": 22099},
                "policy": {"type": "Isolated"},
            }
        },
        failures=1,
    ),
)


def exit_code_of(behaviour: Behaviour, replica: str, life: int) -> int | None:
    """Return the exit code with which a replica fails in one of its lives, or None if it does not fail."""
    lives = behaviour.lives.get(replica)
    if lives is None:
        return None
    code = lives[min(life, len(lives) - 1)]
    return code if code > 0 else None


def is_pause(status: Mapping[str, Any], seconds: float) -> bool:
    """Return whether the pause before a replica's restart has the expected length.

    Times in a status are whole seconds, so the pause may appear up to one second longer.
    """
    [pause] = [
        each["notBefore"] for role in status["ledger"]["roles"].values() for each in role.get("restarts", ())
    ]
    failed = status["lastFailure"]["time"]
    after = (datetime.fromisoformat(pause) - datetime.fromisoformat(failed)).total_seconds()
    return seconds <= after <= seconds + 1


LIFE = """
import os, pathlib, socket, sys, time

def until(condition):
    while not condition():
        time.sleep(0.02)

def marked(kind):
    return len(list(pathlib.Path().glob(f"{kind}-*")))

server = os.environ.get("TRAINING_ROLE") == "PSERVER"
index = os.environ["PADDLE_PSERVER_ID" if server else "PADDLE_TRAINER_ID"]
name = f"{'pserver' if server else 'trainer'}-{index}"
life, trainers = int(os.environ["FLEET_RESTARTS"]), int(os.environ["PADDLE_TRAINERS"])
codes = {each.split(":")[0]: each.split(":")[1].split(",") for each in os.environ["LIVES"].split()}
code = int(codes[name][min(life, len(codes[name]) - 1)]) if name in codes else 0
expected = sum(len([c for c in lives if int(c) > 0]) for lives in codes.values())
first = os.environ["FIRST"]
if server and first:
    deadline = time.monotonic() + 20
    until(lambda: marked("started") >= int(first) or time.monotonic() > deadline)
    time.sleep(0.4)  # whoever does not wait has started by now
    pathlib.Path(f"first-{index}").write_text(str(marked("started")))
if code == -3:
    until(lambda: False)
if server:
    listener = socket.create_server((os.environ["PADDLE_CURRENT_IP"], int(os.environ["PADDLE_PORT"])))
else:
    pathlib.Path(f"started-{index}").touch()
if code == -1:
    until(lambda: False)
if code == -2:
    until(lambda: marked("completed") == trainers - 1)
    time.sleep(0.7)  # the job has succeeded by then
if code > 0:
    until(lambda: marked("started") == trainers)
    pathlib.Path(f"failed-{name}-{life}").touch()
    sys.exit(code)
until(lambda: marked("failed") >= expected)
if expected and life == 0:
    time.sleep(0.7)  # a failure is heard of within milliseconds: whoever is to be stopped for it is stopped
if server:
    until(lambda: marked("completed") == trainers)
else:
    pathlib.Path(f"completed-{index}").touch()
"""
