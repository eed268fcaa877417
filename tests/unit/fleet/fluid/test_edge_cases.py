"""Mistakes that the original accepts, or fails on without a reason: here they work, or raise an error."""

from typing import Any

import pytest
import torch

import fleet
from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan, trainer_plan
from fleet.plan import DistributedMode, DistributeTranspilerConfig
from fleet.plan.config import say_that_async_follows
from tests.support.programs import Parameters, captured, never

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"
PSERVERS = f"{ONE},{TWO}"
GOOD: dict[str, Any] = {"trainer_id": 0, "pservers": PSERVERS, "trainers": 2}


def config(**fields: Any) -> DistributeTranspilerConfig:
    return DistributeTranspilerConfig(**fields)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        pytest.param({"trainer_id": 2}, {}, "trainer_id is 2; .* from 0 to 1", id="trainer-id-too-large"),
        pytest.param({"trainer_id": -1}, {}, "trainer_id is -1", id="trainer-id-negative"),
        pytest.param({"trainer_id": "0"}, {}, "trainer_id is '0'", id="trainer-id-text"),
        pytest.param({"trainer_id": True}, {}, "trainer_id is True", id="trainer-id-flag"),
        pytest.param({"trainers": 0}, {}, "trainers is 0; .* at least 1", id="no-trainers"),
        pytest.param({"trainers": 2.0}, {}, "trainers is 2.0", id="trainers-not-whole"),
        pytest.param(
            {"trainers": "10.0.0.1:6174,10.0.0.2:6174"},
            {},
            "set config.mode = 'nccl2' or 'collective'",
            id="trainers-listed",
        ),
        pytest.param({"pservers": ""}, {}, "pservers is '': it is empty", id="no-servers"),
        pytest.param({"pservers": []}, {}, "it is empty", id="no-servers-listed"),
        pytest.param({"pservers": "10.0.0.1"}, {}, "'10.0.0.1' is not host:port", id="endpoint-without-port"),
        pytest.param({"pservers": f"{ONE},"}, {}, "'' is not host:port", id="trailing-comma"),
        pytest.param({"pservers": f"{ONE};{TWO}"}, {}, "malformed host", id="wrong-separator"),
        pytest.param({"pservers": "a:port"}, {}, "port 'port'", id="endpoint-with-a-word-for-port"),
        pytest.param({"pservers": "a:0"}, {}, "port '0'", id="port-zero"),
        pytest.param({"pservers": "a:65536"}, {}, "port '65536'", id="port-too-large"),
        pytest.param({"pservers": f"{ONE},{ONE}"}, {}, f"'{ONE}' occurs twice", id="duplicate-endpoint"),
        pytest.param({"pservers": 6174}, {}, "'6174' is not host:port", id="servers-a-number"),
        pytest.param({}, {"mode": "nccl2"}, "config.mode = 'nccl2' .*trainers is 2", id="nccl2"),
        pytest.param({}, {"mode": "collective"}, "config.mode = 'collective'", id="collective"),
        pytest.param(
            {},
            {"geo_sgd_need_push_nums": 7},
            "need_push_nums = 7 .* the mode is sync: it belongs to GEO",
            id="pushes-outside-geo",
        ),
        pytest.param(
            {},
            {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 0},
            "geo_sgd_need_push_nums is 0; .* at least 1",
            id="never-pushed",
        ),
        pytest.param(
            {},
            {"geo_sgd_mode": True, "half_async": True},
            "geo_sgd_mode = True and config.half_async = True request two modes",
            id="geo-and-half-async",
        ),
        pytest.param(
            {},
            {"geo_sgd_mode": True, "completely_not_async": True},
            "geo_sgd_mode = True and config.completely_not_async = True",
            id="geo-and-sync",
        ),
        pytest.param(
            {}, {"half_async": True}, "half_async = True needs asynchronous", id="half-async-in-sync"
        ),
        pytest.param(
            {}, {"enable_dc_asgd": True}, "enable_dc_asgd = True .* the mode is sync", id="dc-asgd-in-sync"
        ),
        pytest.param(
            {"sync_mode": False},
            {"enable_dc_asgd": True, "half_async": True},
            "enable_dc_asgd = True .* the mode is half_async",
            id="dc-asgd-in-half-async",
        ),
        pytest.param(
            {},
            {"enable_dc_asgd": True, "geo_sgd_mode": True},
            "enable_dc_asgd = True .* the mode is geo",
            id="dc-asgd-in-geo",
        ),
        pytest.param({}, {"nccl_comm_num": 2}, "config.nccl_comm_num = 2", id="nccl-comm-num"),
        pytest.param(
            {},
            {"use_hierarchical_allreduce": True},
            "use_hierarchical_allreduce",
            id="hierarchical-allreduce",
        ),
        pytest.param(
            {}, {"hierarchical_allreduce_inter_nranks": 4}, "inter_nranks = 4", id="hierarchical-ranks"
        ),
        pytest.param(
            {}, {"collective_mode": "local_sgd"}, "collective_mode = 'local_sgd'", id="collective-mode"
        ),
        pytest.param(
            {}, {"runtime_split_send_recv": True}, "needs asynchronous training", id="split-in-sync"
        ),
        pytest.param({}, {"min_block_size": 8191}, "min_block_size is 8191; .* 8192", id="block-too-small"),
        pytest.param({}, {"min_block_size": "8192"}, "min_block_size is '8192'", id="block-size-text"),
        pytest.param({}, {"slice_var_up": "no"}, "config.slice_var_up is 'no'", id="flag-text"),
        pytest.param(
            {}, {"split_method": "RoundRobbin"}, "config.split_method is 'RoundRobbin'", id="dispatcher"
        ),
    ],
)
def test_is_an_error_before_anything_changes(arguments, fields, message):
    program = captured()
    untouched = program.clone()
    with pytest.raises(TranspileError, match=message):
        DistributeTranspiler(config(**fields)).transpile(**{**GOOD, **arguments}, program=program)
    assert program == untouched
    assert program.startup_program == untouched.startup_program


def test_unknown_endpoint_is_an_error():
    transpiler = DistributeTranspiler()
    transpiler.transpile(**GOOD, program=captured())
    for ask in (
        transpiler.get_pserver_program,
        transpiler.get_pserver_programs,
        transpiler.get_startup_program,
    ):
        with pytest.raises(
            TranspileError, match=r"'10\.0\.0\.3:6174' is not a parameter server; .*10\.0\.0\.1"
        ):
            ask("10.0.0.3:6174")


def test_a_program_of_another_endpoint_is_an_error():
    transpiler = DistributeTranspiler()
    transpiler.transpile(**GOOD, program=captured())
    with (
        pytest.warns(DeprecationWarning, match="pserver_program is not needed"),
        pytest.raises(TranspileError, match=f"belongs to '{ONE}', not to '{TWO}'"),
    ):
        transpiler.get_startup_program(TWO, transpiler.get_pserver_program(ONE))


def test_no_optimizer_is_an_error():
    with pytest.raises(TranspileError, match="no optimizer"):
        DistributeTranspiler().transpile(**GOOD, program=Program(), startup_program=Program())


def test_programs_before_transpile_are_an_error():
    transpiler = DistributeTranspiler()
    asks: list[Any] = [transpiler.get_trainer_program, lambda: transpiler.get_pserver_program(ONE)]
    for ask in asks:
        with pytest.raises(TranspileError, match=r"call transpile\(\) first"):
            ask()


@pytest.mark.parametrize("again", ["same transpiler", "another transpiler", "the trainer's program"])
def test_second_transpile_is_an_error(again):
    program, transpiler = captured(), DistributeTranspiler()
    transpiler.transpile(**GOOD, program=program)
    second = DistributeTranspiler() if again == "another transpiler" else transpiler
    target = transpiler.get_trainer_program() if again == "the trainer's program" else program
    with pytest.raises(TranspileError, match="transpiled already"):
        second.transpile(**GOOD, program=target)


def test_second_transpile_with_the_same_startup_program_is_an_error():
    first, second = captured(), captured()
    DistributeTranspiler().transpile(**GOOD, program=first)
    with pytest.raises(TranspileError, match="startup_program has been transpiled already"):
        DistributeTranspiler().transpile(**GOOD, program=second, startup_program=first.startup_program)


def test_a_clone_taken_before_is_transpiled_on_its_own():
    program = captured()
    clone = program.clone()
    first, second = DistributeTranspiler(), DistributeTranspiler()
    first.transpile(**GOOD, program=program)
    second.transpile(**{**GOOD, "trainer_id": 1}, program=clone)
    assert first.get_pserver_program(ONE) == second.get_pserver_program(ONE)
    assert first.get_trainer_program() != second.get_trainer_program()


@pytest.mark.parametrize(
    ("sync_mode", "fields", "mode"),
    [
        pytest.param(True, {}, DistributedMode.SYNC, id="sync-by-default"),
        pytest.param(False, {}, DistributedMode.HALF_ASYNC, id="transpile-alone-asks-for-async"),
        pytest.param(
            True, {"sync_mode": False}, DistributedMode.HALF_ASYNC, id="config-alone-asks-for-async"
        ),
        pytest.param(
            False,
            {"runtime_split_send_recv": True},
            DistributedMode.ASYNC,
            id="the-sender-cuts-the-gradients",
        ),
        pytest.param(False, {"half_async": True}, DistributedMode.HALF_ASYNC, id="half-async-by-name"),
        pytest.param(
            False,
            {"half_async": True, "runtime_split_send_recv": True},
            DistributedMode.HALF_ASYNC,
            id="half-async-as-the-originals-strategy-says-it",
        ),
        pytest.param(
            False,
            {"half_async": True, "runtime_split_send_recv": True, "completely_not_async": True},
            DistributedMode.SYNC,
            id="sync-as-the-originals-strategy-says-it",
        ),
        pytest.param(
            False, {"enable_dc_asgd": True}, DistributedMode.ASYNC, id="delay-is-compensated-in-async"
        ),
        pytest.param(True, {"geo_sgd_mode": True}, DistributedMode.GEO, id="geo-by-its-own-flag"),
        pytest.param(False, {"geo_sgd_mode": True}, DistributedMode.GEO, id="geo-is-asynchronous-too"),
        pytest.param(
            False,
            {"geo_sgd_mode": True, "sync_mode": False, "runtime_split_send_recv": True},
            DistributedMode.GEO,
            id="geo-as-the-originals-strategy-says-it",
        ),
    ],
)
def test_mode(sync_mode, fields, mode):
    transpiler = DistributeTranspiler(config(**fields))
    transpiler.transpile(**GOOD, program=captured(), sync_mode=sync_mode)
    assert transpiler.get_trainer_program().attr("distributed_mode") == mode
    listen = transpiler.get_pserver_program(ONE).global_block().ops[0]
    assert listen.attr("distributed_mode") == mode
    assert trainer_plan(transpiler.get_trainer_program()).mode is mode
    assert server_plan(transpiler.get_pserver_program(ONE)).mode is mode


def test_a_sender_that_cuts_the_gradients_sends_them_whole():
    transpiler = DistributeTranspiler(config(runtime_split_send_recv=True))
    transpiler.transpile(**GOOD, program=captured(), sync_mode=False)
    ops = transpiler.get_trainer_program().global_block().ops
    assert "split_byref" not in {op.type for op in ops}
    (send,) = (op for op in ops if op.type == "send" and op.input("X") == ["w@GRAD"])
    assert send.attr("sections") == [200, 200]
    assert send.attr("send_varnames") == ["w@GRAD.block0", "w@GRAD.block1"]


def test_global_norm_clipping_transpiles():
    program = captured(grad_clip=fleet.ClipGradByGlobalNorm(1.0))
    transpiler = DistributeTranspiler()
    transpiler.transpile(**GOOD, program=program)
    ops = transpiler.get_pserver_program(ONE).block(1).ops
    assert [op.type for op in ops] == ["sum", "scale", "clip_by_global_norm", "sgd"]


def test_a_distributed_embedding_names_itself():
    model: Any = torch.nn.Sequential(torch.nn.Embedding(10, 2))
    model[0].is_distributed = True
    with pytest.raises(TranspileError, match="module 0 has is_distributed=True"):
        Program.capture(model, never, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_that_bounds_its_rows_in_forward_names_itself_where_servers_step(kind):
    def transpile(*, frozen: bool = False, sparse: bool = False, **fields: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), kind(5, 2, max_norm=1.5, sparse=sparse))
        model[1].weight.requires_grad_(not frozen)
        program = Program.capture(model, never, torch.optim.SGD(model.parameters(), lr=0.1))
        DistributeTranspiler(config(**fields)).transpile(program=program, **GOOD)

    with pytest.raises(TranspileError, match=r"module 1 has max_norm=1\.5: .*torch\.renorm.*mode geo"):
        transpile()
    transpile(geo_sgd_mode=True)
    transpile(frozen=True)
    for geo in (False, True):  # the rows that a trainer steps are beside the weight
        with pytest.raises(TranspileError, match=r"module 1 has max_norm=1\.5: .*the module's output$"):
            transpile(sparse=True, geo_sgd_mode=geo)


def test_a_block_name_that_is_taken_is_an_error():
    module: Any = Parameters({"w": (400, 100)})
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([("w", module.w), ("w.block0", other)], lr=0.1)
    with pytest.raises(TranspileError, match=r"the name w\.block0 is taken"):
        DistributeTranspiler().transpile(**GOOD, program=Program.from_optimizer(optimizer))


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
def test_optimizers_of_whole_parameters_are_never_cut(optimizer):
    shapes = {"w": (400, 100)}
    remedy = r"slice_var_up = False, or DistributeTranspilerConfig\(slice_var_up=False\)"
    with pytest.raises(TranspileError, match=f"{optimizer} .* w would be sliced into 2 .*{remedy}"):
        DistributeTranspiler().transpile(**GOOD, program=captured(shapes, optimizer))
    transpiler = DistributeTranspiler(config(slice_var_up=False))
    transpiler.transpile(**GOOD, program=captured(shapes, optimizer))
    (block,) = server_plan(transpiler.get_pserver_program(ONE)).blocks
    assert block.shape == (400, 100)


def test_defaults_are_the_latest_captured_programs():
    captured({"a": (1,)})
    latest = captured({"z": (1,)})
    assert fleet.default_main_program() is latest
    assert fleet.default_startup_program() is latest.startup_program
    DistributeTranspiler().transpile(0)
    assert latest.startup_program.attr("role") == "trainer"


def test_print_log_tells_where_each_block_goes(capsys):
    DistributeTranspiler(config(print_log=True)).transpile(**GOOD, program=captured())
    printed = capsys.readouterr().out
    assert "w.block0 [200, 100] elements 0 to 20000 on 10.0.0.2:6174" in printed
    assert "10.0.0.1:6174 holds 2 blocks, 20100 elements" in printed


def test_that_async_follows_from_compensating_for_delay_is_said_once(caplog):
    say_that_async_follows.cache_clear()
    for _ in range(2):
        DistributeTranspiler(config(enable_dc_asgd=True)).transpile(
            **GOOD, program=captured(), sync_mode=False
        )
    assert caplog.messages == ["config.enable_dc_asgd = True and sync_mode = False: the mode is async"]


@pytest.mark.parametrize("field", ["enable_dc_asgd", "geo_sgd_need_push_nums"])
def test_what_belongs_to_one_mode_is_refused_in_a_mode_of_the_user_s_own(field):
    class Own:
        name = "own"
        programs = DistributedMode.ASYNC

        def agreement(self):
            return {}

    transpiler = DistributeTranspiler(config(**{field: 1 if field.endswith("nums") else True}), mode=Own())
    with pytest.raises(TranspileError, match=f"config.{field} = .* the mode is own"):
        transpiler.transpile(**GOOD, program=captured())
