"""The `fleet` of a parameter-server job: its answers, and errors for calls that are too early or repeated."""

import atexit
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fleet as package
from fleet import role_maker
from fleet.checkpoint import leave_mark
from fleet.errors import CheckpointError, ConfigurationError
from fleet.fluid import Program
from fleet.parameter_server import Fleet
from fleet.parameter_server import fleet as singleton
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan import TrainerPlan
from fleet.process import lifecycle
from fleet.strategy import DistributedStrategy

ENDPOINTS = ["10.0.0.1:6174", "10.0.0.2:6174"]


@dataclass(eq=False)
class JoinedTrainer:
    """Stands in for a trainer that has joined its servers."""

    plan: TrainerPlan
    completed: bool


@pytest.fixture(autouse=True)
def _leave_the_test_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "start", lambda _: None)


def started(kind: Any = role_maker.Role.WORKER, index: int = 1) -> Fleet:
    fleet = Fleet()
    fleet.init(role_maker.UserDefinedRoleMaker(index, kind, 3, ENDPOINTS))
    return fleet


def sgd(model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or torch.nn.Linear(3, 1)).parameters(), lr=0.1)


def test_a_trainer_knows_its_place():
    fleet = started()
    assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (True, False, False)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (1, 3, 2)
    assert fleet.server_endpoints() == ENDPOINTS
    assert fleet.server_endpoints(to_string=True) == ",".join(ENDPOINTS)
    assert fleet.worker_endpoints() == []
    assert fleet.worker_endpoints(to_string=True) == ""
    assert fleet.step == 0


def test_a_server_knows_its_place():
    fleet = started(role_maker.Role.SERVER)
    assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (False, True, False)
    assert (fleet.server_index(), fleet.server_num()) == (1, 2)


def test_the_first_worker_is_trainer_zero():
    assert started(index=0).is_first_worker()


@pytest.mark.parametrize("name", [name for name in package.__all__ if name not in ("epochs", "steps")])
def test_every_public_name_of_the_package_is_found_here_too(name):
    assert getattr(singleton, name) is getattr(package, name)


def test_what_nobody_has_is_not_found():
    with pytest.raises(AttributeError, match="no_such_name"):
        singleton.no_such_name  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "call",
    [
        lambda fleet: fleet.is_worker(),
        lambda fleet: fleet.server_endpoints(),
        lambda fleet: fleet.distributed_optimizer(sgd()),
        lambda fleet: fleet.init_worker(),
        lambda fleet: fleet.init_server(),
    ],
)
def test_before_init_nothing_works(call):
    with pytest.raises(ConfigurationError, match=r"fleet\.init was not called"):
        call(Fleet())


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        pytest.param("WORKER", "init", "init was called a second time", id="init-twice"),
        pytest.param("WORKER", "init_server", "init_server was called on a trainer", id="no-server"),
        pytest.param("SERVER", "init_server", "distributed_optimizer was not called", id="server-early"),
        pytest.param("SERVER", "run_server", "distributed_optimizer was not called", id="run-early"),
        pytest.param("SERVER", "init_worker", "init_worker was called on a parameter server", id="no-worker"),
        pytest.param("WORKER", "init_worker", "before fleet.distributed_optimizer", id="worker-early"),
        pytest.param("WORKER", "stop_worker", "init_worker was not called", id="stop-early"),
        pytest.param("WORKER", "barrier_worker", "init_worker was not called", id="barrier-early"),
    ],
)
def test_a_call_out_of_place_says_what_comes_first(kind, call, words):
    fleet = started(getattr(role_maker.Role, kind))
    with pytest.raises(ConfigurationError, match=words):
        getattr(fleet, call)()


def test_there_are_no_programs_before_the_optimizer():
    with pytest.raises(ConfigurationError, match="distributed_optimizer was not called"):
        _ = started().main_program


def test_a_model_dir_without_a_checkpoint_is_refused_by_name(tmp_path):
    fleet = started(role_maker.Role.SERVER)
    fleet.distributed_optimizer(sgd())
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no checkpoint"):
        fleet.init_server(str(tmp_path))


def test_a_model_dir_that_is_server_was_told_is_what_the_server_begins_with(tmp_path):
    fleet = started(role_maker.Role.SERVER)
    assert fleet.is_server(model_dir=tmp_path)
    fleet.distributed_optimizer(sgd())
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no checkpoint"):
        fleet.init_server()


@pytest.mark.parametrize("owner", [package, singleton])
def test_what_the_original_has_and_this_has_not_says_what_to_use(owner):
    with pytest.raises(AttributeError, match=r"no CompiledProgram: run the program itself with fleet\.Exec"):
        owner.CompiledProgram  # noqa: B018
    with pytest.raises(AttributeError, match=r"no CompiledProgram: run the program itself"):
        owner.CompiledProgram  # noqa: B018
    assert not hasattr(owner, "BuildStrategy")


def test_a_collective_role_is_refused():
    collective = role_maker.UserDefinedCollectiveRoleMaker(0, ["10.0.0.1:6175"])
    with pytest.raises(ConfigurationError, match=r"collective job.*fleet\.collective"):
        Fleet().init(collective)


def test_a_malformed_variable_is_found_at_init(monkeypatch):
    monkeypatch.setenv("FLAGS_rpc_deadline", "soon")
    with pytest.raises(ConfigurationError, match="FLAGS_rpc_deadline is 'soon'"):
        started()


def test_a_second_optimizer_is_refused():
    fleet = started()
    fleet.distributed_optimizer(sgd())
    with pytest.raises(
        ConfigurationError, match=r"called a second time; expected one optimizer .*\.zero_grad\(\)"
    ):
        fleet.distributed_optimizer(sgd())


def test_the_optimizer_shares_the_param_groups():
    wrapped = sgd()
    optimizer = started().distributed_optimizer(wrapped)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is wrapped.param_groups
    optimizer.param_groups[0]["lr"] = 7.0
    assert wrapped.param_groups[0]["lr"] == 7.0


@pytest.mark.parametrize("on_wrapped", [True, False])
def test_a_scheduler_moves_the_learning_rate_and_never_warns(on_wrapped, monkeypatch):
    wrapped = sgd()
    optimizer = started().distributed_optimizer(wrapped)
    monkeypatch.setattr(optimizer, "_trainer", type("Trainer", (), {"step": lambda *_: False})())
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped if on_wrapped else optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.step()
            scheduler.step()
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            lambda o: o.step(lambda: 0.0), r"step\(closure\) .*call backward\(\) yourself", id="closure"
        ),
        pytest.param(lambda o: o.step(), r"call fleet\.init_worker\(\)", id="no-session"),
        pytest.param(lambda o: o.state_dict(), r"call fleet\.init_worker\(\)", id="no-state"),
        pytest.param(
            lambda o: o.add_param_group({"params": [torch.zeros(1)]}),
            "fixed set of parameters",
            id="another-group",
        ),
        pytest.param(lambda o: o.minimize(lambda _: 0.0), "so pass it, as in", id="minimize-without-a-model"),
    ],
)
def test_what_the_optimizer_cannot_do_says_so(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call(started().distributed_optimizer(sgd()))


@pytest.mark.parametrize("of_fleet", [False, True], ids=["the-optimizers", "fleets"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(
            lambda _: (mean_of, Program()),
            r"minimize: startup_program is <Program: .*run fleet\.startup_program after minimize",
            id="a-startup-program",
        ),
        pytest.param(
            lambda model: (mean_of, None, list(model.parameters())),
            r"parameter_list is a list, and the optimizer determines what is trained",
            id="parameters",
        ),
        pytest.param(
            lambda _: (mean_of, None, None, {"bias"}), "no_grad_set is {'bias'}, and", id="frozen-ones"
        ),
        pytest.param(
            lambda model: (model(torch.ones(1, 3)).mean(),),
            r"found a Tensor: .*pass the function.*minimize\(cost\)",
            id="a-tensor",
        ),
        pytest.param(lambda _: (0.5,), r"found a float: .*minimize\(cost\)", id="a-number"),
    ],
)
def test_what_minimize_does_not_take_is_named_with_what_to_write_instead(given, words, of_fleet):
    fleet, model = started(), torch.nn.Linear(3, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    minimize = fleet.minimize if of_fleet else optimizer.minimize
    with pytest.raises(ConfigurationError, match=words):
        minimize(*given(model))
    minimize(mean_of, None, parameter_list=None)
    assert fleet.main_program.source is not None


def mean_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = model(x).mean()
    return mean


def test_a_state_is_loaded_before_the_servers_have_it_and_refused_afterwards():
    fleet = started()
    model = torch.nn.Linear(3, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    other.step()
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups is optimizer._wrapped.param_groups
    assert torch.equal(optimizer._wrapped.state[model.weight]["momentum_buffer"], torch.ones(1, 3))
    optimizer.hand_over()
    with pytest.raises(ConfigurationError, match=r"call it earlier, in every role, or load a checkpoint"):
        optimizer.load_state_dict(other.state_dict())


def test_minimize_gives_this_replicas_programs():
    def loss_fn(model: Any, x: Any) -> Any:
        return model(x).mean()

    for kind, types in (("WORKER", {"send", "recv"}), ("SERVER", {"listen_and_serv"})):
        fleet, model = started(getattr(role_maker.Role, kind)), torch.nn.Linear(3, 1)
        optimizer = fleet.distributed_optimizer(sgd(model), model=model)
        optimizer.minimize(loss_fn)
        assert types <= {op.type for op in fleet.main_program.global_block().ops}
        assert fleet.startup_program.attrs["role"] == fleet.main_program.attrs["role"]


def test_a_server_has_its_programs_before_it_serves():
    fleet, model = started(role_maker.Role.SERVER), torch.nn.Linear(3, 1)
    fleet.distributed_optimizer(sgd(model), model=model)
    assert fleet.server_program == fleet.main_program
    assert fleet.server_program.attr("endpoint") == ENDPOINTS[1]
    assert fleet.server_program.startup_program == fleet.startup_program


def test_a_trainer_has_no_server_program():
    fleet = started()
    fleet.distributed_optimizer(sgd())
    with pytest.raises(ConfigurationError, match=r"exists only on parameter servers, .* fleet\.main_program"):
        _ = fleet.server_program


@pytest.mark.parametrize("minimized", [False, True])
def test_the_strategy_s_clipping_is_in_the_server_s_program(minimized):
    fleet, model = started(role_maker.Role.SERVER), torch.nn.Linear(3, 1)
    strategy = DistributedStrategy(sync_mode=True, grad_clip=package.ClipGradByNorm(2.0))
    optimizer = fleet.distributed_optimizer(sgd(model), strategy, model=model)
    if minimized:
        optimizer.minimize(lambda model, x: model(x).mean())
    ops = [op.type for block in fleet.server_program.blocks[1:] for op in block.ops]
    assert ops == ["sum", "scale", "clip_by_norm", "sgd"] * (len(ops) // 4)


def test_clipping_where_training_is_not_synchronous_names_the_remedy():
    fleet = started()
    strategy = DistributedStrategy(grad_clip=package.ClipGradByNorm(2.0), sync_mode=False)
    with pytest.raises(ConfigurationError, match=r"needs synchronous training.*overlap=False"):
        fleet.distributed_optimizer(sgd(), strategy)


def test_the_strategy_reaches_the_transpiler():
    fleet, model = started(), torch.nn.Linear(400, 400)
    uncut = package.DistributeTranspilerConfig(slice_var_up=False)
    fleet.distributed_optimizer(sgd(model), DistributedStrategy(transpiler=uncut), model=model)
    sends = [op for op in fleet.main_program.global_block().ops if op.type == "send"]
    assert all(len(op.input("X")) == 1 for op in sends)


def test_forks_are_left_to_python_before_grpc_is_imported():
    program = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
sys.meta_path.insert(0, Watch())
from fleet.parameter_server import fleet
fleet.init_server
"""
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout == "0\n"
    assert logging.getLogger("fleet.parameter_server").handlers == []


def test_a_trainer_whose_training_has_ended_waits_for_no_server(tmp_path, monkeypatch):
    known = {"FLEET_CHECKPOINT_DIR": str(tmp_path), "FLEET_JOB_UID": "uid-1", "FLEET_LIFE": "0"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    leave_mark(known, {0, 1, 2})
    monkeypatch.setattr(lifecycle, "joined", lambda: None)
    monkeypatch.setattr(Trainer, "join", lambda *_, **__: pytest.fail("it joined the servers"))
    fleet, model = started(), torch.nn.Linear(3, 1)
    fleet.distributed_optimizer(sgd(model), model=model).minimize(lambda m: m(torch.ones(3)).sum())
    with pytest.raises(SystemExit) as ended:
        fleet.init_worker()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("completed", "failed", "is_told"),
    [
        pytest.param(False, False, True, id="a-script-that-forgets-stop-worker"),
        pytest.param(True, False, False, id="one-that-called-it"),
        pytest.param(False, True, False, id="one-that-ends-by-an-error"),
    ],
)
def test_a_script_that_ends_without_stop_worker_is_told_so(monkeypatch, caplog, completed, failed, is_told):
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(lifecycle, "joined", lambda: None)
    monkeypatch.setattr(lifecycle, "failed", lambda: failed)
    monkeypatch.setattr(Trainer, "join", lambda plan, *_, **__: JoinedTrainer(plan, completed))
    fleet, model = started(), torch.nn.Linear(3, 1)
    fleet.distributed_optimizer(sgd(model), model=model)
    fleet.init_worker()
    ((call, *given),) = at_exit
    call(*given)
    assert (
        "without fleet.stop_worker(): the parameter servers treat trainer 1 as lost" in caplog.text
    ) is is_told
