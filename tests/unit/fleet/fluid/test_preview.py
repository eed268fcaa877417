"""Programs printed in place of being run: by each role, in both forms, without a socket."""

from typing import Any

import pytest
import torch

import fleet
from fleet import role_maker
from fleet.errors import ConfigurationError, TranspileError
from fleet.fluid import DistributeTranspiler, preview
from fleet.parameter_server import Fleet
from fleet.process import lifecycle
from tests.support.programs import never

ONE = "10.0.0.1:6174"


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preview.VARIABLE, "1")
    monkeypatch.setattr(preview, "_shown", [])
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    monkeypatch.setattr(lifecycle, "joined", lambda: pytest.fail("a replica has joined"))


def transpiled() -> tuple[DistributeTranspiler, fleet.Program]:
    model = torch.nn.Linear(3, 1)
    program = fleet.Program.capture(model, never, torch.optim.SGD(model.parameters(), lr=0.1))
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program=program, pservers=ONE, trainers=2)
    return transpiler, program


def ends_well(call: Any, *arguments: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    assert ended.value.code == 0


@pytest.mark.parametrize("kind", [role_maker.Role.WORKER, role_maker.Role.SERVER])
def test_a_loop_prints_both_programs_and_ends(kind, capsys):
    replica, model = Fleet(), torch.nn.Linear(3, 1)
    replica.init(role_maker.UserDefinedRoleMaker(0, kind, 2, [ONE]))
    replica.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    ends_well(replica.init_worker if replica.is_worker() else replica.init_server)
    startup, program = replica.startup_program, replica.main_program
    assert (
        capsys.readouterr().out == f"// the startup program\n{startup}\n\n// the main program\n{program}\n\n"
    )


def test_a_loop_does_not_print_a_program_that_was_edited(capsys):
    replica, model = Fleet(), torch.nn.Linear(3, 1)
    replica.init(role_maker.UserDefinedRoleMaker(0, role_maker.Role.WORKER, 2, [ONE]))
    replica.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    replica.main_program.global_block().append_op("print")
    with pytest.raises(TranspileError, match="operator print"):
        replica.init_worker()
    assert capsys.readouterr().out == ""


def test_an_executor_on_a_trainer_prints_each_program_once(capsys):
    transpiler, program = transpiled()
    executor = fleet.Executor()
    assert executor.run(program.startup_program) == []
    first = capsys.readouterr().out
    assert first == f"// the startup program\n{program.startup_program}\n\n"
    ends_well(executor.run, transpiler.get_trainer_program(), {"x": 0, "y": 0})
    assert capsys.readouterr().out == f"// the main program\n{transpiler.get_trainer_program()}\n\n"


def test_an_executor_on_a_server_prints_each_program_once(capsys):
    transpiler, _ = transpiled()
    executor = fleet.Executor()
    assert executor.run(transpiler.get_startup_program(ONE)) == []
    ends_well(executor.run, transpiler.get_pserver_program(ONE))
    assert capsys.readouterr().out.count("// the startup program") == 1


def test_local_programs_run_all_the_same(capsys):
    model = torch.nn.Linear(3, 1)
    program = fleet.Program.capture(
        model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    (loss,) = fleet.Executor().run(program, {"x": torch.ones(3)}, ["loss"])
    assert loss.shape == (1,)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", "0", "False"])
def test_nothing_is_printed_where_nobody_asks(text, monkeypatch, capsys):
    monkeypatch.setenv(preview.VARIABLE, text)
    assert preview.previewed(transpiled()[0].get_trainer_program()) is False
    assert capsys.readouterr().out == ""


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(preview.VARIABLE, "startup")
    with pytest.raises(ConfigurationError, match="FLEET_PRINT_PROGRAM is 'startup'; expected 1"):
        preview.previewed(fleet.Program())
