"""The way of one gradient is the one that docs/architecture.md describes."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fleet
from fleet.parameter_server.trainer.marks import SentGradient
from tests.support.parameter_server import QUICK, loopback

PACKAGE = Path(fleet.__file__).parent
NUMEL = 37
"""Nothing else of the job has so many elements."""
STEPS_THAT_ARE_WATCHED = 4
"""In the first steps a flow looks at every gradient twice."""


def holds_bytes(value: Any, depth: int = 0) -> bool:
    """Tell whether a value is, or has in it, the gradient's bytes or those of the value that answers it."""
    if isinstance(value, torch.nn.Parameter):
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() == NUMEL
    if isinstance(value, memoryview):
        return value.nbytes == 4 * NUMEL
    if isinstance(value, list | tuple) and depth < 3:
        return any(holds_bytes(each, depth + 1) for each in value)
    return isinstance(value, SentGradient)


@contextmanager
def traced(files: set[str]) -> Iterator[threading.Event]:
    """Collect the files whose functions get or return such bytes while the event is set, in any thread."""
    tracing = threading.Event()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if not tracing.is_set() or event not in ("call", "return"):
            return
        code = frame.f_code
        path = Path(code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in names] if event == "call" else [argument]
        if any(map(holds_bytes, given)):
            files.add(path.relative_to(PACKAGE).as_posix())

    threading.setprofile(profile)
    try:
        yield tracing
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def trace(transport: str) -> set[str]:
    """Train a parameter for some steps; return the files that hold its gradient or value in the last one."""
    files: set[str] = set()

    settings = replace(QUICK, transport=transport)

    def model() -> torch.nn.Module:
        return torch.nn.Linear(NUMEL, 1, bias=False)

    with traced(files) as tracing, loopback(model=model, settings=settings) as job:
        trainer, module, _ = job.make_trainer()
        trainer.start()
        sys.setprofile(threading.getprofile())  # this thread computes as well
        for step in range(STEPS_THAT_ARE_WATCHED + 1):
            module.zero_grad()
            if step == STEPS_THAT_ARE_WATCHED:
                tracing.set()
            module(torch.ones(2, NUMEL)).sum().backward()
            trainer.step()
            tracing.clear()
        sys.setprofile(None)
        trainer.complete()
    return files


@pytest.mark.parametrize(("transport", "other"), [("tcp", "shared memory"), ("shared_memory", "TCP")])
def test_a_gradient_passes_the_eleven_files_that_the_documentation_names(transport, other):
    page = Path("docs/architecture.md").read_text()
    section = page.partition("## The way of one gradient")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. `([^`]+)`(?: \(([^)]+)\))?:", section, re.MULTILINE)
    way = {path for path, only in named if only != other}
    assert len(way) == 11
    assert trace(transport) == way
