"""Kills replicas of training jobs at random, and checks that this does not change any bit of the results.

``python -m benchmarks.kills --json`` trains a small model synchronously with two parameter servers and two
trainers, once without interruption and then in jobs whose servers and trainers it kills at random steps and
at random moments within them: 200 kills for each of SGD, momentum and Adam. A killed trainer restarts with a
higher attempt. If a server is killed, the whole job restarts from its last checkpoint, as under the operator.
Each job must succeed, and every trainer must end with the digest of the uninterrupted job. A trainer resumes
in a half-made step if some blocks had completed the step and others had not.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.replicas import Job, Replica, job

__all__ = ["Outcome", "half_made", "main", "show", "steps_made", "train"]

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "runtime" / "parameter_server" / "scripts" / "kills.py"
OPTIMIZERS = ("sgd", "momentum", "adam")
SERVERS = TRAINERS = 2
PAUSE_SECONDS = 0.002
"""The pause between two gradients of a step, so that many kills happen there."""
STEPS_PER_KILL = 8
SAVE_EVERY = 5
WITHIN_SECONDS = 0.03
"""The maximum time between the completion of a step and the kill."""
PATIENCE_SECONDS = 120.0


@dataclass
class Outcome:
    """The outcome of a job whose replicas were killed.

    Attributes
    ----------
    digests : set of str
        The digests of the trainers' final parameters.
    killed : Counter
        The numbers of servers and trainers that were killed.
    half_made : int
        The number of trainer restarts in a step that only some blocks had completed.
    """

    digests: set[str] = field(default_factory=set)
    killed: Counter[str] = field(default_factory=Counter)
    half_made: int = 0


class _Lives:
    """The running replicas of a job."""

    def __init__(self, running: Job, steps: int) -> None:
        self._running = running
        self._steps = str(steps)
        self._attempts: Counter[str] = Counter()
        self.servers: list[Replica] = []
        self.trainers: list[Replica] = []

    def start(self) -> None:
        """Start every replica for a new attempt of the job."""
        self._attempts["job"] += 1
        self.servers = [
            self._running.server(index, SCRIPT, self._steps, **self._environ(f"server-{index}"))
            for index in range(SERVERS)
        ]
        self.trainers = [self._trainer(index) for index in range(TRAINERS)]

    def kill(self, chance: random.Random) -> str:
        """Kill a random replica and restart what the operator would; return its role ("" if it had ended)."""
        victim = chance.choice([*self.servers, *self.trainers])
        if victim.process.poll() is not None:
            return ""
        os.kill(victim.process.pid, signal.SIGKILL)
        if victim in self.trainers:
            index = self.trainers.index(victim)
            self._end(victim)
            self.trainers[index] = self._trainer(index)
            return "trainer"
        for replica in (*self.servers, *self.trainers):
            self._end(replica)
        self.start()
        return "server"

    def wait_for_step(self, step: int) -> bool:
        """Wait until a trainer has completed a step; return False if all trainers end first."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            ended = [replica.process.poll() for replica in self.trainers]
            if max(steps_made(replica) for replica in self.trainers) >= step:
                return True
            if any(ended):
                for replica in self.trainers:
                    replica.expect(0, seconds=PATIENCE_SECONDS)
            if None not in ended:
                return False
            time.sleep(0.005)
        logs = "\n".join(f"{each.name}:\n{each.output[-2000:]}" for each in (*self.servers, *self.trainers))
        raise AssertionError(f"step {step} was not made within {PATIENCE_SECONDS:g} s:\n{logs}")

    def _end(self, replica: Replica) -> None:
        replica.process.kill()
        replica.process.wait(PATIENCE_SECONDS)

    def _trainer(self, index: int) -> Replica:
        return self._running.trainer(index, SCRIPT, self._steps, **self._environ(f"trainer-{index}"))

    def _environ(self, name: str) -> dict[str, str]:
        self._attempts[name] += 1
        return {"FLEET_RESTARTS": str(self._attempts[name]), "FLEET_LIFE": str(self._attempts["job"])}


def train(folder: Path, optimizer: str, steps: int, kills_at: Sequence[int] = (), seed: int = 0) -> Outcome:
    """Train a job to its end, and kill a replica after each of the given steps.

    Parameters
    ----------
    folder : Path
        The folder of the job's logs and checkpoints.
    optimizer : str
        One of `OPTIMIZERS`.
    steps : int
    kills_at : sequence of int
        The steps after which a replica is killed, in ascending order.
    seed : int
        The seed for the choice of replicas and moments.

    Raises
    ------
    AssertionError
        A replica has failed; the message contains its log.
    """
    chance, outcome = random.Random(seed), Outcome()  # noqa: S311 (not used for secrets)
    environ = {
        "OPTIMIZER": optimizer,
        "PAUSE": str(PAUSE_SECONDS if kills_at else 0.0),
        "SAVE_EVERY": str(SAVE_EVERY),
        "FLEET_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "FLEET_HEARTBEAT_SECONDS": "1",
    }
    with job(folder, SERVERS, TRAINERS, rounds=1, **environ) as running:
        lives = _Lives(running, steps)
        lives.start()
        for step in kills_at:
            if not lives.wait_for_step(step):
                break
            time.sleep(chance.uniform(0.0, WITHIN_SECONDS))
            if victim := lives.kill(chance):
                outcome.killed[victim] += 1
        for replica in (*lives.trainers, *lives.servers):
            replica.expect(0, seconds=PATIENCE_SECONDS)
        outcome.digests = {_digest(replica) for replica in lives.trainers}
        outcome.half_made = half_made(running.replicas)
    return outcome


def steps_made(replica: Replica) -> int:
    """Return the number of completed steps according to a trainer's log, or 0 if there are none."""
    with replica.log.open("rb") as log:
        log.seek(max(0, replica.log.stat().st_size - 400))
        made = re.findall(rb"made step (\d+)\n", log.read())
    return int(made[-1]) if made else 0


def _digest(replica: Replica) -> str:
    (found,) = re.findall(r"^weights (\w+)$", replica.output, re.M)
    return str(found)


def half_made(replicas: Sequence[Replica]) -> int:
    """Count the restarts in which a trainer resumed a step that only some blocks had completed."""
    found = re.compile(r"trainer (\d+) \(attempt (\d+)\) receives the values of step \d+, which")
    return len({life for replica in replicas for life in found.findall(replica.output)})


def run(kills: int, per_job: int, optimizers: Sequence[str], seed: int) -> dict[str, Any]:
    """Kill the given number of replicas in jobs with each optimizer; return a summary of the outcomes."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-kills-"))
    rows = []
    chance = random.Random(seed)  # noqa: S311 (not used for secrets)
    steps = STEPS_PER_KILL * (per_job + 1)
    for optimizer in optimizers:
        expected = train(_made(folder / f"{optimizer}-undisturbed"), optimizer, steps).digests
        killed, half_made, jobs, other = Counter[str](), 0, 0, 0
        while killed.total() < kills:
            number = min(per_job, kills - killed.total())
            at = sorted(chance.sample(range(1, steps - STEPS_PER_KILL), number))
            place = _made(folder / f"{optimizer}-{jobs}")
            outcome = train(place, optimizer, steps, at, chance.getrandbits(32))
            killed += outcome.killed
            half_made += outcome.half_made
            jobs += 1
            if outcome.digests == expected:
                shutil.rmtree(place)
            else:
                other += 1
            print(
                f"{optimizer}: {killed.total()} killed, {jobs} jobs, {other} of them with other bits",
                file=sys.stderr,
                flush=True,
            )
        rows.append(
            {
                "optimizer": optimizer,
                "trainers_killed": killed["trainer"],
                "servers_killed": killed["server"],
                "came_back_to_half_made_steps": half_made,
                "jobs": jobs,
                "jobs_with_other_bits": other,
            }
        )
    if not any(row["jobs_with_other_bits"] for row in rows):
        shutil.rmtree(folder)
    return {"benchmark": "kills", "seed": seed, "steps": steps, "rows": rows}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def show(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    print(
        f"{'':<12}{'killed: trainers':>18}{'servers':>9}{'half-made steps':>17}{'jobs':>6}{'other bits':>12}"
    )
    for row in summary["rows"]:
        print(
            f"{row['optimizer']:<12}{row['trainers_killed']:>18}{row['servers_killed']:>9}"
            f"{row['came_back_to_half_made_steps']:>17}{row['jobs']:>6}{row['jobs_with_other_bits']:>12}"
        )


def main() -> None:
    """Run with the command-line options; exit with status 1 if kills changed the result of any job."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kills", type=int, default=200, help="for each optimizer (default: %(default)s)")
    parser.add_argument("--per-job", type=int, default=10, help="how many hit one job (default: %(default)s)")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help=f"of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # to end all processes
    summary = run(options.kills, options.per_job, options.optimizers.split(","), options.seed)
    if options.json:
        print(json.dumps(summary))
    else:
        show(summary)
    sys.exit(any(row["jobs_with_other_bits"] for row in summary["rows"]))


if __name__ == "__main__":
    main()
