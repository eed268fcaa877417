"""How far one gradient and one look-up travel: the files and functions of the package that they call."""

import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fleet
from tests.support.parameter_server import QUICK, loopback

PACKAGE = Path(fleet.__file__).parent
MOST_FILES = {"gradient": 18, "look-up": 14}
MOST_FUNCTIONS = {"gradient": 87, "look-up": 44}
MOST_OF_ONE_NAME = 3
"""Functions of one way that share a name."""
EARLIER_STEPS = 5
"""In the first steps, a trainer looks at every gradient twice."""
QUIET_SECONDS = 0.1
TRAINING_THREADS = ("MainThread", "fleet-io", "fleet-work")
"""Heartbeats of other threads come at any time, and are not part of the way."""

Function = tuple[str, str]
"""A file of the package, and the qualified name of a function."""


class Trace:
    """The functions that are called between `begin` and `end`, in any training thread."""

    def __init__(self) -> None:
        self.calls: Counter[Function] = Counter()
        self._on = threading.Event()

    def begin(self) -> None:
        """Count calls from now on."""
        self._on.set()

    def end(self) -> None:
        """Stop once no thread has called anything for a while."""
        seen = -1
        while seen != (seen := self.calls.total()):
            time.sleep(QUIET_SECONDS)
        self._on.clear()

    @property
    def files(self) -> set[str]:
        """The files of these functions."""
        return {file for file, _ in self.calls}

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call; a profile function of `sys`."""
        if not self._on.is_set() or event != "call" or frame.f_code.co_name.startswith("<"):
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and threading.current_thread().name.startswith(TRAINING_THREADS):
            self.calls[path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname] += 1


@contextmanager
def traced(model: Callable[[], torch.nn.Module]) -> Iterator[tuple[Trace, Any, Any]]:
    """Give a trace, which sees all threads, with a trainer of a job over TCP and its module."""
    trace = Trace()
    threading.setprofile(trace.profile)
    try:
        # With rare heartbeats, no watchdog probes a connection that is silent for a moment.
        settings = replace(QUICK, transport="tcp", heartbeat_seconds=1.0)
        with loopback(model=model, settings=settings) as job:
            trainer, module, _ = job.make_trainer()
            trainer.start()
            sys.setprofile(trace.profile)  # this thread computes as well
            yield trace, trainer, module
            sys.setprofile(None)
            trainer.complete()
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def walk_of_a_gradient() -> Trace:
    """Trace a step of one parameter, from the backward pass to the adopted value."""
    with traced(lambda: torch.nn.Linear(37, 1, bias=False)) as (trace, trainer, module):
        for step in range(EARLIER_STEPS + 1):
            module.zero_grad()
            if step == EARLIER_STEPS:
                trace.begin()
            module(torch.ones(2, 37)).sum().backward()
            trainer.step()
        trace.end()
    return trace


def walk_of_a_look_up() -> Trace:
    """Trace a forward pass of an embedding, from the module's call to the rows."""
    with traced(lambda: fleet.nn.DistributedEmbedding(1000, 8, name="clicks")) as (trace, trainer, module):
        ids = torch.tensor([[1, 2], [3, 1]])
        for _ in range(EARLIER_STEPS):
            module(ids).sum().backward()
            trainer.step()
        module(ids)  # its rows come once the servers have taken all frames of the steps
        trace.begin()
        module(ids)
        trace.end()
    return trace


@pytest.fixture(scope="module", params=["gradient", "look-up"])
def walk(request: pytest.FixtureRequest) -> tuple[str, Trace]:
    """Return a way's name and its trace."""
    return request.param, walk_of_a_gradient() if request.param == "gradient" else walk_of_a_look_up()


def test_a_way_takes_few_files_and_functions(walk):
    way, trace = walk
    listing = "\n".join(
        f"{count:4} {file} {function}" for (file, function), count in sorted(trace.calls.items())
    )
    assert len(trace.files) <= MOST_FILES[way], listing
    assert len(trace.calls) <= MOST_FUNCTIONS[way], listing


def test_few_functions_of_a_way_share_a_name(walk):
    _, trace = walk
    names: dict[str, set[str]] = {}
    for file, function in trace.calls:
        name = function.rpartition(".")[2]
        names.setdefault(name, set()).add(f"{file}: {function}")
    shared = {name: each for name, each in names.items() if len(each) > MOST_OF_ONE_NAME}
    assert shared == {}


def test_the_files_that_the_documentation_names_are_on_the_way(walk):
    way, trace = walk
    page = Path("docs/architecture.md").read_text()
    heading = {"gradient": "## The path of one gradient", "look-up": "## The path of one look-up"}[way]
    named = re.findall(r"^\d+\. `([^`]+)`", page.partition(heading)[2].partition("\n## ")[0], re.MULTILINE)
    assert named
    assert set(named) - trace.files == set()
