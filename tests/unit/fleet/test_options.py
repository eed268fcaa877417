"""Every option in every way to train: carried out, or refused by its name; see `fleet.options`."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet as package
from fleet import DistributedStrategy, DistributeTranspilerConfig
from fleet.collective import Fleet as CollectiveFleet
from fleet.collective.trainer import Trainer as CollectiveTrainer
from fleet.errors import ConfigurationError
from fleet.fluid import Program
from fleet.fluid import collective_executor as collective_steps
from fleet.fluid.render import trainer_plan
from fleet.options import MODES, OPTIONS, Verdict, Where, refusal, rule_for
from fleet.parameter_server import Fleet, sessions
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan import DistributedMode
from fleet.process import lifecycle
from fleet.role_maker import JobIdentity, Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from fleet.role_maker.variables import SYNC_MODES
from tests.support.programs import captured

ROOT = Path(__file__).parents[3]
OF_STRATEGY = [field.name for field in dataclasses.fields(DistributedStrategy) if field.name != "transpiler"]
OF_CONFIG = [field.name for field in dataclasses.fields(DistributeTranspilerConfig)]
JOBS = dict(zip(MODES, SYNC_MODES, strict=False))  # a mode of the user's own is no job's


_OTHER_MODE = (
    "FLEET_SYNC_MODE is Geo, but the script has transpiled its program for Sync, which takes precedence"
)


class Own:
    """A mode of the user's own, as far as a strategy and a transpiler look at it."""

    name = "own"
    programs = DistributedMode.ASYNC

    def agreement(self) -> dict[str, str]:
        return {}

    def __repr__(self) -> str:
        return self.name


OWN: Any = Own()
TRIALS: dict[str, tuple[Any, ...]] = {
    "strategy.sync_mode": (True, False),
    "strategy.mode": (OWN,),
    "strategy.overlap": (True, False),
    "strategy.cross_step": (True,),
    "strategy.server_kernels": ("fused",),
    "strategy.transport": ("tcp", "shared_memory"),
    "strategy.wire_dtype": ("bfloat16", "float16"),
    "strategy.local_sgd": (package.LocalSGD(k_steps=8),),
    "strategy.power_sgd": (package.PowerSGD(),),
    "strategy.broadcast_buffers": (False,),
    "strategy.non_finite": ("stop", "skip"),
    "strategy.grad_clip": (package.ClipGradByNorm(1.0),),
    "config.slice_var_up": (False,),
    "config.split_method": ("HashName",),
    "config.min_block_size": (10000,),
    "config.enable_dc_asgd": (True,),
    "config.mode": ("nccl2", "collective"),
    "config.print_log": (True,),
    "config.wait_port": (False,),
    "config.remote_prefetch": (False,),
    "config.runtime_split_send_recv": (True,),
    "config.sync_mode": (False,),
    "config.half_async": (True,),
    "config.completely_not_async": (True,),
    "config.geo_sgd_mode": (True,),
    "config.geo_sgd_need_push_nums": (7,),
    "config.nccl_comm_num": (2,),
    "config.use_hierarchical_allreduce": (True,),
    "config.hierarchical_allreduce_inter_nranks": (8,),
    "config.collective_mode": ("grad_allreduce", "local_sgd", "single_process_multi_thread"),
    "FLEET_SYNC_MODE": SYNC_MODES[1:],
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "DistributeTranspiler.mode": (OWN,),
    "transpile.sync_mode": (False,),
    "transpile.pservers": ("10.0.0.7:6174", "10.0.0.7:6174,10.0.0.8:6174"),
    "get_trainer_program.wait_port": (False,),
}
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "strategy.sync_mode": ("test_mode",),
    "strategy.mode": ("test_a_job_trains_with_it_by_its_strategy_alone",),
    "strategy.overlap": ("test_what_the_strategy_says_reaches_a_session_of_either_form",),
    "strategy.cross_step": ("test_two_trainers_that_wait_in_the_forward_pass_train_as_one_process_does",),
    "strategy.server_kernels": ("test_a_fused_update_is_the_fused_optimizers_own",),
    "strategy.transport": ("test_shared_memory_learns_what_tcp_learns_to_the_bit",),
    "strategy.wire_dtype": (
        "test_every_mode_learns_nearly_the_same",
        "test_rounded_gradients_take_half_the_bytes",
    ),
    "strategy.local_sgd": ("test_it_is_what_it_is_said_to_be_to_the_bit",),
    "strategy.power_sgd": ("test_matrices_travel_as_products_of_narrow_ones",),
    "strategy.broadcast_buffers": ("test_buffers_follow_trainer_0s_unless_they_are_not_to",),
    "strategy.non_finite": (
        "test_a_step_with_a_gradient_that_is_no_number_is_made_by_nobody",
        "test_a_step_with_a_gradient_that_is_no_number",
    ),
    "strategy.grad_clip": ("test_the_result_is_torch_s_and_two_runs_are_equal_to_the_bit",),
    "config.slice_var_up": ("test_optimizers_of_whole_parameters_are_never_cut",),
    "config.split_method": ("test_parameter_and_gradient_share_a_server",),
    "config.min_block_size": ("test_no_block_but_the_last_is_smaller_than_the_least",),
    "config.enable_dc_asgd": ("test_delay_is_compensated_by_operators_before_everything_else",),
    "config.mode": (
        "test_each_value_is_carried_out_or_refused_by_name",
        "test_two_trainers_learn_what_one_process_learns",
    ),
    "config.print_log": ("test_print_log_tells_where_each_block_goes",),
    "config.wait_port": ("test_wait_port_of_the_config_reaches_a_startup_program_that_runs_first",),
    "config.remote_prefetch": ("test_a_trainer_has_a_copy_of_a_table_whose_rows_it_does_not_fetch",),
    "config.runtime_split_send_recv": ("test_mode",),
    "config.sync_mode": ("test_mode",),
    "config.half_async": ("test_mode",),
    "config.completely_not_async": ("test_mode",),
    "config.geo_sgd_mode": ("test_mode",),
    "config.geo_sgd_need_push_nums": ("test_geo_pushes_as_often_as_the_strategy_says",),
    "config.collective_mode": (
        "test_each_value_is_carried_out_or_refused_by_name",
        "test_the_configs_local_sgd_averages_after_every_step",
    ),
    "DistributeTranspiler.mode": ("test_a_program_does_not_run_without_the_modes_object",),
    "transpile.sync_mode": ("test_mode",),
    "transpile.pservers": ("test_parameter_and_gradient_share_a_server",),
    "get_trainer_program.wait_port": ("test_wait_port_needs_both_and_holds_for_the_startup_program_too",),
    "Executor.place": ("test_a_place_is_the_trainers",),
    "FLEET_SYNC_MODE": ("test_mode",),
}
"""For each option that some way to train accepts, the tests of its effect, by name."""
ELSEWHERE = {*ARGUMENTS, "transpile.current_endpoint", "Executor.place"}
"""Options that are tried below, or by a test in `SHOWN_BY`."""
WAYS = [
    *(Where(True, mode, by_executor) for mode in MODES for by_executor in (False, True)),
    Where(False),
    Where(False, by_executor=True),
]
BY_HAND = Where(False, by_executor=True)
ALONE = "127.0.0.1:1"
MODE_SAID: dict[tuple[str, Any], DistributedMode] = {
    ("strategy.sync_mode", True): DistributedMode.SYNC,
    ("strategy.sync_mode", False): DistributedMode.HALF_ASYNC,
    ("config.runtime_split_send_recv", True): DistributedMode.ASYNC,
    ("config.sync_mode", False): DistributedMode.HALF_ASYNC,
    ("config.half_async", True): DistributedMode.HALF_ASYNC,
    ("config.completely_not_async", True): DistributedMode.SYNC,
    ("config.geo_sgd_mode", True): DistributedMode.GEO,
    **{("FLEET_SYNC_MODE", job): mode for job, mode in zip(SYNC_MODES, DistributedMode, strict=True)},
}


@pytest.fixture(autouse=True)
def _leave_the_test_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "start", lambda _: None)


def test_every_field_has_a_row_and_a_trial_and_nothing_else_has():
    fields = {f"strategy.{name}" for name in OF_STRATEGY} | {f"config.{name}" for name in OF_CONFIG}
    assert OPTIONS.keys() == TRIALS.keys() | ELSEWHERE
    assert TRIALS.keys() == fields | {"FLEET_SYNC_MODE"}


def test_every_accepted_option_has_a_test_of_its_effect():
    effects = {Verdict.CARRIED_OUT, Verdict.SELECTS_THE_MODE}
    accepted = {name for name, rules in OPTIONS.items() if effects & {rule.verdict for rule in rules}}
    assert SHOWN_BY.keys() == accepted
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for option, names_of_tests in SHOWN_BY.items():
        for name in names_of_tests:
            assert re.search(rf"^def {name}\(", tests, re.MULTILINE), (option, name)


def strategy_with(name: str, value: Any, where: Where) -> DistributedStrategy:
    """Return a strategy that differs from the default in one option, set as a script of Paddle's sets it."""
    strategy = DistributedStrategy(mode=OWN if where.mode == "own" else None)
    owner, _, field = name.partition(".")
    if owner == "config":
        setattr(strategy.transpiler, field, value)
    elif owner == "strategy":
        setattr(strategy, field, value)
    return strategy


def train(name: str, value: Any, where: Where, monkeypatch: pytest.MonkeyPatch) -> DistributedMode | None:
    """Go as far as a script goes before it joins anybody; return the mode that its programs are for."""
    job = value if name == "FLEET_SYNC_MODE" else JOBS.get(where.mode, "Sync")
    monkeypatch.setenv("FLEET_SYNC_MODE", job)
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == BY_HAND and not name.startswith("strategy."):
        start_by_hand(name, value, monkeypatch)
        return None
    if not where.servers:
        fleet: Any = CollectiveFleet()
        if name == "FLEET_SYNC_MODE":
            fleet.init(UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:1"]))
        try:
            fleet.distributed_optimizer(sgd, strategy_with(name, value, where))
        except ConfigurationError as error:
            if "fleet.init was not called" not in str(error):
                raise
        return None  # it would have met the other trainers next
    fleet = Fleet()
    fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 2, ["127.0.0.1:1"]))
    optimizer = fleet.distributed_optimizer(sgd, strategy_with(name, value, where), model=model)
    if where.by_executor:
        optimizer.minimize(lambda model, x: model(x).mean())
    return DistributedMode(fleet.main_program.attr("distributed_mode"))


class Unmet(CollectiveTrainer):
    """A trainer that joins no other: it checks its options, and keeps the strategy that it was given."""

    given: DistributedStrategy

    def distribute(self, optimizer: Any, strategy: Any = None, model: Any = None) -> Any:
        self.given = strategy
        return super().distribute(optimizer, strategy, model)


def start_by_hand(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> Unmet:
    """Have an Executor start up a program of collective training, until it would meet the other trainers."""
    config = DistributeTranspilerConfig(mode="collective")
    if name.startswith("config."):
        setattr(config, name.removeprefix("config."), value)
    main = captured()
    transpile_alone(package.DistributeTranspiler(config), main)
    trainer = Unmet()
    if name != "FLEET_SYNC_MODE":
        monkeypatch.setattr(trainer, "join", lambda _: None)
    monkeypatch.setattr(collective_steps, "this_trainer", trainer)
    try:
        package.Executor().run(main.startup_program)
    except ConfigurationError as error:
        if "fleet.init was not called" not in str(error):
            raise
    return trainer


def transpile_alone(transpiler: package.DistributeTranspiler, main: Program, **arguments: Any) -> None:
    """Transpile for a job of one trainer without servers."""
    transpiler.transpile(0, main, trainers=ALONE, current_endpoint=ALONE, **arguments)


def refusal_of(call: Callable[[], object]) -> str:
    """Return what a script is told that asks for something; empty where it may go on."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


def names(message: str, name: str, value: Any) -> bool:
    """Whether a message names an option by the last part of its name, and its value."""
    return name.rpartition(".")[2] in message and str(value) in message


def check(name: str, value: Any, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that what becomes of a value is what the table says."""
    verdict = rule_for(name, package.HashName if value == "HashName" else value, where).verdict
    modes: list[DistributedMode | None] = []
    message = refusal_of(lambda: modes.append(train(name, value, where, monkeypatch)))
    case = (value, where, message)
    assert bool(message) == (verdict is Verdict.REFUSED), case
    if message:
        assert names(message, name, value), case
        assert "leave it at" in message, case
    elif verdict is Verdict.SELECTS_THE_MODE:
        assert modes == [MODE_SAID[name, value]], case
    elif where.servers:
        programs = "async" if where.mode == "own" or name == "strategy.mode" else where.mode
        assert modes == [DistributedMode[programs.upper()]], case


@pytest.mark.parametrize("name", TRIALS)
def test_each_value_is_carried_out_or_refused_by_name(name, monkeypatch):
    for value in TRIALS[name]:
        for where in WAYS:
            if not (where.mode == "own" and name == "FLEET_SYNC_MODE"):  # the script's word, not the job's
                check(name, value, where, monkeypatch)


@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith("config.")])
@pytest.mark.parametrize("mode", MODES)
def test_a_transpiler_called_by_hand_carries_each_value_out_or_refuses_it(name, mode):
    base: dict[str, Any] = {
        "sync": {},
        "async": {"sync_mode": False, "runtime_split_send_recv": True},
        "half_async": {"sync_mode": False, "half_async": True},
        "geo": {"geo_sgd_mode": True},
        "own": {},
    }[mode]
    for value in TRIALS[name]:
        config = DistributeTranspilerConfig(**base | {name.removeprefix("config."): value})
        rule = rule_for(name, config.split_method if name.endswith("method") else value, Where(True, mode))
        transpiler = package.DistributeTranspiler(config, mode=OWN if mode == "own" else None)
        message = refusal_of(partial(transpiler.transpile, 0, captured(), trainers=2))
        if rule.verdict is not Verdict.SELECTS_THE_MODE:
            assert bool(message) == (rule.verdict is Verdict.REFUSED)
        assert not message or names(message, name, value)


@pytest.mark.parametrize("name", [name for name in TRIALS if name.startswith("config.")])
@pytest.mark.parametrize("mode", ["nccl2", "collective"])
def test_a_transpiler_called_by_hand_for_collective_training_refuses_what_its_fleet_does(name, mode):
    for value in TRIALS[name]:
        config = DistributeTranspilerConfig(**{"mode": mode} | {name.removeprefix("config."): value})
        rule = rule_for(name, config.split_method if name.endswith("method") else value, BY_HAND)
        main = captured()
        message = refusal_of(partial(transpile_alone, package.DistributeTranspiler(config), main))
        refused = rule.verdict is Verdict.REFUSED
        assert bool(message) == refused == ("transpiled" not in main.attrs), (value, message)
        if refused:
            assert names(message, name, value)
            assert "in collective training" in message
            assert rule.text in message


def make_alone(mode: str, main: Program, name: str, value: Any) -> None:
    """Make a trainer's program of collective training, with one argument of one of the calls."""
    call, _, argument = name.partition(".")
    given = {"DistributeTranspiler": {}, "transpile": {}, "get_trainer_program": {}, call: {argument: value}}
    config = DistributeTranspilerConfig(mode=mode)
    transpiler = package.DistributeTranspiler(config, **given["DistributeTranspiler"])
    transpile_alone(transpiler, main, **given["transpile"])
    transpiler.get_trainer_program(**given["get_trainer_program"])


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("mode", ["nccl2", "collective"])
def test_an_argument_that_only_servers_give_a_meaning_is_refused(name, mode):
    for value in ARGUMENTS[name]:
        main = captured()
        message = refusal_of(partial(make_alone, mode, main, name, value))
        assert f"{name} = {value!r} is not supported in collective training" in message
        assert ("transpiled" in main.attrs) == name.startswith("get_trainer_program")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"sync_mode": True, "pservers": "127.0.0.1:6174"}, id="the-defaults"),
        pytest.param({"pservers": ["127.0.0.1:6174"]}, id="the-default-as-a-list"),
        pytest.param({"pservers": ""}, id="no-servers"),
        pytest.param({"pservers": []}, id="no-servers-as-a-list"),
    ],
)
def test_what_asks_for_nothing_of_servers_is_accepted(arguments):
    transpiler = package.DistributeTranspiler(DistributeTranspilerConfig(mode="nccl2"))
    transpile_alone(transpiler, captured(), **arguments)
    assert transpiler.get_trainer_program(wait_port=True).attrs["role"] == "collective"


@pytest.mark.parametrize(
    ("value", "averaged"), [(None, None), ("grad_allreduce", None), ("local_sgd", package.LocalSGD())]
)
def test_what_a_program_of_collective_training_averages_reaches_the_fleet(monkeypatch, value, averaged):
    trainer = start_by_hand("config.collective_mode", value, monkeypatch)
    assert trainer.given.parameters_averaged() == averaged


@pytest.mark.parametrize("servers", [pytest.param(True, id="servers"), pytest.param(False, id="collective")])
def test_a_config_in_place_of_a_strategy_is_what_a_strategy_that_has_it_is(servers, monkeypatch):
    monkeypatch.setenv("FLEET_SYNC_MODE", "Sync")

    def asked(given: Any) -> tuple[str, list[Program]]:
        fleet: Any = Fleet() if servers else CollectiveFleet()
        if servers:
            fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 2, ["127.0.0.1:1"]))
        model = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        message = refusal_of(partial(fleet.distributed_optimizer, sgd, given, model))
        return message, [fleet.main_program] if servers and not message else []

    for name, values in TRIALS.items():
        for value in values if name.startswith("config.") else ():
            config = DistributeTranspilerConfig(**{name.removeprefix("config."): value})
            assert asked(config) == asked(DistributedStrategy(transpiler=config)), (name, value)


class _Completed:
    """A trainer that asks no server for anything."""

    completed = True
    current_step = 0


@pytest.mark.parametrize(
    ("job", "said"),
    [("Geo", [_OTHER_MODE]), ("Sync", [])],
)
def test_a_script_that_transpiles_by_hand_says_that_its_mode_counts(monkeypatch, caplog, job, said):
    monkeypatch.setenv("FLEET_SYNC_MODE", job)
    monkeypatch.setattr(Trainer, "join", lambda *_, **__: _Completed())
    transpiler, program = package.DistributeTranspiler(), captured()
    transpiler.transpile(0, program=program, trainers=2)
    assert program.source is not None
    sessions.start_trainer(trainer_plan(transpiler.get_trainer_program()), program.source, JobIdentity())
    assert caplog.messages == said


def test_a_current_endpoint_changes_no_program():
    made = []
    given: tuple[dict[str, Any], ...] = ({}, {"current_endpoint": "10.0.0.9:6174"})
    for arguments in given:
        transpiler = package.DistributeTranspiler()
        transpiler.transpile(0, program=captured(), trainers=2, **arguments)
        made.append((transpiler.get_trainer_program(), *transpiler.get_pserver_programs("127.0.0.1:6174")))
    assert made[0] == made[1]


def test_a_refusal_says_option_value_way_and_what_works_instead():
    assert refusal("config.nccl_comm_num", 2, 1, Where(servers=False)) == (
        "config.nccl_comm_num = 2 is not supported in collective training: all buckets share one "
        "communicator; leave it at 1"
    )
    with_servers = Where(True, "geo", by_executor=True)
    assert (refusal("strategy.cross_step", True, False, with_servers) or "").startswith(
        "strategy.cross_step = True is not supported with parameter servers and an Executor, where the mode "
        "is geo: "
    )
    assert refusal("config.nccl_comm_num", 1, 1, Where(servers=False)) is None
