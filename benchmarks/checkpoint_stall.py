"""Benchmarks how long a checkpoint stalls training and how much memory it takes, against torch.save.

``python -m benchmarks.checkpoint_stall`` trains the model of 25 million parameters with Adam (300 MB of
state) on one parameter server and one trainer, in sync mode over loopback, and saves checkpoints during
training. It prints the time until ``fleet.save_check_point`` returned, the time until the manifest was
durable, the number of steps in between, and the increase of the server's peak memory. The same state is then
saved by ``torch.save`` and ``fsync`` in one process, which waits for the result. Run it on an idle machine,
because all processes share the cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload import MAX_BATCH, build_layers
from tests.support.processes import free_ports

__all__ = ["main"]

WARM_STEPS = 4
STEPS = 8


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*build_layers())
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> float:
    began = time.perf_counter()
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - began


def _memory(pid: int, field: str) -> float:
    """Return the value, in MB, of a memory field in the file /proc/PID/status of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"/proc/{pid}/status has no {field}; this benchmark needs Linux")


def _begin_peak(pid: int) -> float:
    """Reset a process's peak memory and return its current memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def _environment(role: str, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "TRAINING_ROLE": role,
        "PADDLE_TRAINING_ROLE": role,
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{port}",
        "PADDLE_PSERVER_IPS": "127.0.0.1",
        "PADDLE_PSERVER_PORT": str(port),
        "PADDLE_PORT": str(port),
        "PADDLE_CURRENT_IP": "127.0.0.1",
        "POD_IP": "127.0.0.1",
        "PADDLE_TRAINERS": "1",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_PSERVER_ID": "0",
        "PADDLE_TRAINER_ID": "0",
    }


def _fleet_process(folder: str, saves: int, server: int) -> dict[str, Any]:
    """Run a replica; return the measurements of a trainer, which include the server's memory."""
    from fleet import role_maker
    from fleet.parameter_server import fleet

    fleet.init(role_maker.PaddleCloudRoleMaker())
    model, adam = _model()
    optimizer = fleet.distributed_optimizer(adam, model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    data = torch.randn(MAX_BATCH, 1024, generator=torch.Generator().manual_seed(1))
    for _ in range(WARM_STEPS):
        _step(model, optimizer, data)
    found: list[dict[str, float]] = []
    before = 0.0
    for number in range(saves):
        alone = [_step(model, optimizer, data) for _ in range(STEPS)]
        now = _begin_peak(server)
        before = before or now  # the process keeps freed memory for the next save
        began = time.perf_counter()
        fleet.save_check_point(folder)
        stall = time.perf_counter() - began
        manifest, meanwhile = Path(folder) / f"checkpoint-{number}" / "manifest.json", []
        while not manifest.exists():
            meanwhile.append(_step(model, optimizer, data))
        durable = time.perf_counter() - began
        found.append(
            {
                "stall": stall,
                "durable": durable,
                "step": statistics.median(alone),
                "steps": len(meanwhile),
                "step_meanwhile": statistics.median(meanwhile) if meanwhile else 0.0,
                "peak": _memory(server, "VmHWM") - before,
                "bytes": sum(path.stat().st_size for path in manifest.parent.iterdir()) / 1e6,
            }
        )
    fleet.stop_worker()
    return {"saves": found}


def _plain(folder: str, saves: int) -> dict[str, Any]:
    model, optimizer = _model()
    _step(model, optimizer, torch.randn(MAX_BATCH, 1024))
    found, first = [], 0.0
    for number in range(saves):
        now = _begin_peak(os.getpid())
        first = first or now
        began = time.perf_counter()
        with (Path(folder) / f"{number}.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        stall = time.perf_counter() - began
        found.append({"stall": stall, "peak": _memory(os.getpid(), "VmHWM") - first})
    return {"saves": found}


def _median(saves: list[dict[str, float]], field: str) -> float:
    return statistics.median(save[field] for save in saves)


def main() -> None:
    """Run the benchmark, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go; a temporary one otherwise")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as", dest="part", choices=("fleet", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        plain = given.part == "plain"
        found = (
            _plain(given.folder, given.saves)
            if plain
            else _fleet_process(given.folder, given.saves, given.server)
        )
        print(json.dumps(found), file=sys.__stdout__)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        (port,) = free_ports(1)
        itself = [sys.executable, "-m", "benchmarks.checkpoint_stall", "--saves", str(given.saves)]
        replica = [*itself, "--folder", folder, "--as", "fleet"]
        with subprocess.Popen(
            replica, env=_environment("PSERVER", port), stdout=subprocess.DEVNULL
        ) as server:
            try:
                asked = [*replica, "--server", str(server.pid)]
                ours = _last(subprocess.check_output(asked, env=_environment("TRAINER", port)))
            except BaseException:
                server.kill()
                raise
        plain = _last(subprocess.check_output([*itself, "--folder", folder, "--as", "plain"]))
    if given.json:
        print(json.dumps({"fleet": ours, "plain": plain, "load": os.getloadavg()}))
        return
    print(
        f"median of {given.saves} saves of {_median(ours, 'bytes'):.0f} MB; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores\n"
        f"fleet.save_check_point: training waits {_median(ours, 'stall'):.2f} s; durable after "
        f"{_median(ours, 'durable'):.2f} s, in which {_median(ours, 'steps'):.0f} steps were made, of "
        f"{_median(ours, 'step_meanwhile'):.2f} s each ({_median(ours, 'step'):.2f} s without a save); the "
        f"server's memory rises by {_median(ours, 'peak'):.0f} MB meanwhile\n"
        f"torch.save and fsync:   training waits {_median(plain, 'stall'):.2f} s; the process's memory rises "
        f"by {_median(plain, 'peak'):.0f} MB"
    )


def _last(output: bytes) -> list[dict[str, float]]:
    saves: list[dict[str, float]] = json.loads(output.splitlines()[-1])["saves"]
    return saves


if __name__ == "__main__":
    main()
