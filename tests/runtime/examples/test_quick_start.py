"""The quick start in both forms and in all three places, each role in a thread of this process."""

import re
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet import collective, parameter_server
from fleet.process import lifecycle
from fleet.role_maker import Role, RoleMaker, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from tests.support.processes import free_ports
from tests.support.threads import at_once, one_torch_thread

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "quick_start"
STEPS = 101
UNTRAINED = 0.69  # of two classes, each as likely


@pytest.fixture(autouse=True)
def _few_steps_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["quick_start", "--steps", str(STEPS)])
    with one_torch_thread():
        yield


def load(
    name: str, monkeypatch: pytest.MonkeyPatch, package: Any = None, maker: RoleMaker | None = None
) -> Any:
    """Load a script as a process with this role would; return its main function."""
    if package is not None:

        class Placed(package.Fleet):  # type: ignore[misc]
            def init(self, role_maker: RoleMaker | None = maker) -> None:
                super().init(role_maker)

        monkeypatch.setattr(package, "fleet", Placed())
    return runpy.run_path(str(FOLDER / f"{name}.py"))["main"]


def losses(capsys: pytest.CaptureFixture[str]) -> list[float]:
    printed = capsys.readouterr().out
    return [float(value) for value in re.findall(r"^loss on other points: ([0-9.]+)", printed, re.M)]


def test_in_one_process_both_forms_train_alike(monkeypatch, capsys):
    for form in ("loop", "program"):
        load(f"{form}_local", monkeypatch)()
    loop, program = losses(capsys)
    assert loop == program < UNTRAINED


@pytest.mark.parametrize("form", ["loop", "program"])
def test_with_parameter_servers(form, monkeypatch, capsys):
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    mains = [
        load(f"{form}_ps", monkeypatch, parameter_server, UserDefinedRoleMaker(index, role, 2, endpoints))
        for role in (Role.SERVER, Role.WORKER)
        for index in range(2)
    ]
    at_once(*mains, seconds=60)
    assert max(losses(capsys)) < UNTRAINED


@pytest.mark.parametrize("form", ["loop", "program"])
def test_collectively(form, monkeypatch, capsys):
    (port,) = free_ports(1)
    maker = UserDefinedCollectiveRoleMaker(0, [f"127.0.0.1:{port}"])
    before = threading.active_count()
    load(f"{form}_collective", monkeypatch, collective, maker)()
    (loss,) = losses(capsys)
    assert loss < UNTRAINED
    assert threading.active_count() <= before + 1
