"""What jobs do, whoever runs them: one table for a cluster of Kubernetes and for this machine.

A case says how the lives of its replicas end, and what the job comes to. On a cluster kwok's pods end as the
case says; on this machine `LIFE` does, run by Python as each replica's command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["BEHAVIOURS", "LATE", "LIFE", "NEVER", "Behaviour", "exit_code_of"]

NEVER, LATE = -1, -2
"""In place of exit codes: a life that does not end by itself, and one that outlives those of the others."""


@dataclass(frozen=True)
class Behaviour:
    """One job of two servers and two trainers (or of two trainers only), and what it comes to.

    Attributes
    ----------
    lives : mapping
        By replica, such as ``trainer-1``, the exit codes of its lives; the last one repeats. A replica that
        is not named does its part: a server serves, a trainer ends well after all failures have happened.
    spec : mapping
        What the job's spec says beside.
    state, reason : str
        What the job comes to, and the reason of that condition.
    failures, job_restarts : int
        What its status counts then.
    """

    id: str
    lives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    state: str = "Succeeded"
    reason: str = "TrainersCompleted"
    failures: int = 0
    job_restarts: int = 0
    collective: bool = False


def _rules(*rules: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return {"failurePolicy": {**policy, "rules": list(rules)}}


BEHAVIOURS = (
    Behaviour("a-job-whose-trainers-complete-succeeds"),
    Behaviour("a-failed-trainer-restarts-alone", {"trainer-1": (1, 0)}, failures=1),
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
        _rules({"onExitCodes": [42], "action": "RestartJob"}),
        failures=1,
        job_restarts=1,
    ),
    Behaviour(
        "a-rule-fails-the-job-at-once",
        {"trainer-1": (42,)},
        _rules({"onReason": ["Error"], "role": "trainer", "action": "FailJob"}),
        state="Failed",
        reason="ReplicaFailed",
        failures=1,
    ),
    Behaviour(
        "an-ignored-exit-code-counts-as-no-failure",
        {"trainer-1": (42, 0)},
        _rules({"onExitCodes": [42], "action": "Ignore"}, action="FailJob"),
    ),
    Behaviour(
        "the-first-rule-that-matches-decides",
        {"trainer-1": (42, 0)},
        _rules(
            {"role": "pserver", "action": "FailJob"},
            {"onExitCodes": [42], "action": "RestartReplica"},
            {"role": "trainer", "action": "FailJob"},
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
        {"successPolicy": "RankZero"},
    ),
    Behaviour(
        "what-says-how-pods-are-reached-changes-nothing-of-what-they-do",
        {"trainer-0": (1, 0)},
        {"network": {"hostNetwork": True, "portRange": {"first": 22000, "last": 22099}, "policy": True}},
        failures=1,
    ),
)


def exit_code_of(behaviour: Behaviour, replica: str, life: int) -> int | None:
    """Return how a life of a replica ends; None if it does its part."""
    lives = behaviour.lives.get(replica)
    if lives is None:
        return None
    code = lives[min(life, len(lives) - 1)]
    return code if code > 0 else None


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
