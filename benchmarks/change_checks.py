"""Benchmarks the share of a step that a trainer spends on detecting changed gradients and parameters.

``python -m benchmarks.change_checks`` trains a perceptron of a million parameters in 40 tensors with one
parameter server and one trainer in sync mode, with one thread each. In the trainer it measures the time spent
in the functions that mark gradients and parameters and compare the marks, including the overhead of
measuring. The first steps, which compare everything, are excluded. Run it on an idle machine.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.support.replicas import job

__all__ = ["main", "summary"]

REPLICA = Path(__file__).parent / "checked_trainer.py"


def summary(transport: str, rounds: list[dict[str, float]]) -> str:
    """Return a line that summarizes all rounds of one transport."""
    shares = sorted(100 * each["checks"] / each["step"] for each in rounds)
    step, checks = (statistics.median(each[name] for each in rounds) for name in ("step", "checks"))
    return (
        f"{transport}: a step takes {1e3 * step:.2f} ms, of which checks {1e6 * checks:.0f} us: "
        f"{statistics.median(shares):.2f} % [{shares[0]:.2f}-{shares[-1]:.2f}]"
    )


def main() -> None:
    """Run the benchmark and print one line for each transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of 50 steps each")
    given = parser.parse_args()
    for transport in ("tcp", "shared_memory"):
        with tempfile.TemporaryDirectory() as folder, job(Path(folder), servers=1, trainers=1) as running:
            servers, trainers = running.start(REPLICA, transport, str(given.rounds))
            for replica in (*trainers, *servers):
                replica.expect(0, seconds=300)
            lines = trainers[0].output.splitlines()
            rounds = [json.loads(line.removeprefix("round ")) for line in lines if line.startswith("round ")]
        print(summary(transport, rounds))


if __name__ == "__main__":
    main()
