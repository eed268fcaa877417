"""Compares the model quality of ``examples/ctr`` in each mode with that of single-process training.

``python -m benchmarks.ctr_modes`` writes files in Criteo's format with a known ground truth, and trains the
example on them with ``fleet.launch_ps``, two parameter servers and two trainers, once in each mode. For
comparison, a single process trains on the same lines with the same batch size; for sync mode, with the
combined batches of all trainers. The result is the area under the ROC curve on separate test lines. In modes
without a barrier, it is that of the trainer that finishes last, whose values include all updates.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.running import say
from fleet.datasets.criteo_generator import write

__all__ = ["main"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "ctr"
MODES = ("Sync", "Async", "HalfAsync", "Geo")
TRAINERS, SERVERS = 2, 2
FIRST_PORT = 21_170
AUC = re.compile(r"^test AUC: ([0-9.]+)$", re.MULTILINE)


def auc_of_twin(files: Sequence[Path], batch_size: int, lr: float) -> float:
    """Train in one process and return the final AUC."""
    script = [sys.executable, str(EXAMPLE / "single.py"), *_flags(files, batch_size, lr)]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    return _auc("the twin", ended.returncode, ended.stdout, ended.stderr)


def auc_of_job(mode: str, files: Sequence[Path], batch_size: int, lr: float, logs: Path) -> float:
    """Train with servers and trainers; return the final AUC of the last trainer to finish."""
    launch = [
        *(sys.executable, "-m", "fleet.launch_ps", f"--server_num={SERVERS}", f"--worker_num={TRAINERS}"),
        *(f"--start_port={FIRST_PORT}", f"--log_dir={logs}"),
    ]
    ended = subprocess.run(
        [*launch, str(EXAMPLE / "train.py"), *_flags(files, batch_size, lr)],
        env={**os.environ, "FLEET_SYNC_MODE": mode},
        capture_output=True,
        text=True,
        check=False,
    )
    workers = sorted(logs.glob("workerlog.*"), key=lambda log: log.stat().st_mtime)
    said = workers[-1].read_text() if workers else ""
    return _auc(f"the job in mode {mode}", ended.returncode, said, ended.stdout + ended.stderr)


def _flags(files: Sequence[Path], batch_size: int, lr: float) -> list[str]:
    return [*map(str, files), f"--batch-size={batch_size}", f"--lr={lr}"]


def _auc(who: str, status: int, said: str, more: str) -> float:
    found = AUC.search(said)
    if status != 0 or found is None:
        raise SystemExit(f"{who} has ended with status {status} and no AUC:\n{said[-2000:]}\n{more[-2000:]}")
    return float(found[1])


def run(modes: Sequence[str], lines: int, batch_size: int, lr: float, seed: int) -> dict[str, Any]:
    """Return the AUC of single-process training and of each mode."""
    with tempfile.TemporaryDirectory() as made:
        files = [Path(made) / "train.gz", Path(made) / "test.gz"]
        best = [
            write(path, count, seed=seed + number)
            for number, (path, count) in enumerate(zip(files, (lines, lines // 5), strict=True))
        ]
        found: dict[str, Any] = {"benchmark": "ctr_modes", "lines": lines, "batch_size": batch_size, "lr": lr}
        found |= {"perfect": best[-1], "modes": {}}
        for mode in modes:
            together = batch_size * (TRAINERS if mode == "Sync" else 1)
            twin = auc_of_twin(files, together, lr)
            auc = auc_of_job(mode, files, batch_size, lr, Path(made) / mode)
            found["modes"][mode] = {"auc": auc, "twin": twin, "batch_size_of_twin": together}
            say(f"{mode}: {auc:.4f}, the twin {twin:.4f}")
    return found


def show(found: Mapping[str, Any]) -> None:
    """Print the AUC of each mode as a table."""
    print(f"{found['lines']} lines; AUC of a perfect model: {found['perfect']:.4f}")
    print(f"{'mode':<12}{'AUC':>8}{'twin':>8}{'difference':>12}{'batches of the twin':>22}")
    for mode, row in found["modes"].items():
        difference = row["auc"] - row["twin"]
        print(
            f"{mode:<12}{row['auc']:>8.4f}{row['twin']:>8.4f}{difference:>+12.4f}{row['batch_size_of_twin']:>22}"
        )


def main() -> None:
    """Run the comparison with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_modes", description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)} (default: all)")
    parser.add_argument("--lines", type=int, default=100_000, help="to train on (default: 100000)")
    parser.add_argument("--batch-size", type=int, default=500, help="of each trainer (default: 500)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of the lines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    modes = options.modes.split(",")
    if len(set(modes)) != len(modes) or not set(modes) <= set(MODES):
        parser.error(f"--modes is {options.modes!r}; expected each at most once, of {', '.join(MODES)}")
    if options.lines < 5 or options.batch_size < 1:
        parser.error(
            f"--lines is {options.lines} and --batch-size {options.batch_size}; expected 5 and 1 or more"
        )
    found = run(modes, options.lines, options.batch_size, options.lr, options.seed)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
