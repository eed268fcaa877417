"""Real trainers: one process per rank, all of which run one script."""

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.collective import ForkedTrainer, environments
from tests.support.processes import free_ports

PRELUDE = """
import json, os, pathlib, sys, time
import torch
from fleet import role_maker
from fleet.collective import fleet

torch.set_num_threads(1)

def build(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)

def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return torch.nn.functional.cross_entropy(model(x), y)

"""


class Trainer(ForkedTrainer):
    """One rank, which runs the script of its folder."""

    def __init__(self, folder: Path, rank: int, env: Mapping[str, str]) -> None:
        self._errors = folder / f"errors-{rank}"
        with self._errors.open("wb") as errors, (folder / f"output-{rank}").open("wb") as output:
            super().__init__(Path("script.py"), env=env, output=output, errors=errors, cwd=folder)

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Wait for its end; return what it has said to its standard error."""
        self.wait(timeout)
        return None, self._errors.read_text()


@pytest.fixture
def trainers(tmp_path):
    """Start one process per rank on a script; all are killed at the end of the test."""
    started = []

    def start(body: str, *, ranks: tuple[int, ...] = (0, 1), size: int = 2, **environ: str):
        (tmp_path / "script.py").write_text(PRELUDE + textwrap.dedent(body))
        environments_of = environments(tmp_path, free_ports(size))
        for rank in ranks:
            env = os.environ | environments_of[rank] | environ
            started.append(Trainer(tmp_path, rank, env=env))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
