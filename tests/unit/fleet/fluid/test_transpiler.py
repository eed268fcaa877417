"""The calls of the transpiler, in every order and with the arguments that the original deprecates."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import check_unedited, trainer_plan
from fleet.plan import DistributeTranspilerConfig
from tests.support.programs import captured

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"

Ask = Callable[[DistributeTranspiler], Any]
ASKS: dict[str, Ask] = {
    "trainer": lambda transpiler: transpiler.get_trainer_program().clone(),
    "trainer, ports": lambda transpiler: transpiler.get_trainer_program(wait_port=True).clone(),
    "server one": lambda transpiler: transpiler.get_pserver_program(ONE),
    "server two": lambda transpiler: transpiler.get_pserver_program(TWO),
    "both of one": lambda transpiler: transpiler.get_pserver_programs(ONE),
    "start of one": lambda transpiler: transpiler.get_startup_program(ONE),
    "start of two": lambda transpiler: transpiler.get_startup_program(TWO),
    "start of two, as the original": lambda transpiler: transpiler.get_startup_program(
        TWO, transpiler.get_pserver_program(TWO)
    ),
}


def transpiled(program: Program | None = None, trainer_id: int = 0, **fields: Any) -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**fields))
    transpiler.transpile(trainer_id, program=program or captured(), pservers=[ONE, TWO], trainers=2)
    return transpiler


def answers(order: list[str], trainer_id: int) -> dict[str, Any]:
    transpiler = transpiled(trainer_id=trainer_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {name: ASKS[name](transpiler) for name in order}


@settings(max_examples=30, deadline=None)
@given(st.permutations(list(ASKS)), st.integers(0, 1), st.data())
def test_every_order_of_the_calls_gives_equal_programs(order, trainer_id, data):
    repeated = data.draw(st.lists(st.sampled_from(order), max_size=4))
    assert answers([*order, *repeated], trainer_id) == answers(list(ASKS), trainer_id)


@settings(max_examples=5, deadline=None)
@given(st.permutations(list(ASKS)))
def test_no_call_changes_what_was_answered_before(order):
    transpiler = transpiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        given_ = [(name, ASKS[name](transpiler)) for name in order]
    again = answers(order, 0)
    assert all(answer == again[name] for name, answer in given_)


def test_a_servers_two_programs_belong_together():
    program, startup = transpiled().get_pserver_programs(ONE)
    assert program.startup_program is startup


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pserver_program"}, "pserver_program is not needed"),
        ({"startup_program"}, "startup_program is not needed"),
        ({"pserver_program", "startup_program"}, "pserver_program and startup_program is not needed"),
    ],
)
def test_deprecated_arguments_warn_and_change_nothing(arguments, named):
    program = captured()
    transpiler = transpiled(program)
    known = {
        "pserver_program": transpiler.get_pserver_program(ONE),
        "startup_program": program.startup_program,
    }
    with pytest.warns(DeprecationWarning, match=named) as caught:
        found = transpiler.get_startup_program(ONE, **{name: known[name] for name in arguments})
    assert caught[0].filename == __file__
    assert found == transpiler.get_startup_program(ONE)


def test_without_the_deprecated_arguments_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transpiled().get_startup_program(ONE)


def test_another_startup_program_is_an_error():
    transpiler = transpiled()
    other = captured({"v": (3,)}).startup_program
    with (
        pytest.warns(DeprecationWarning, match="startup_program is not needed"),
        pytest.raises(TranspileError, match="startup_program is not the one that was transpiled"),
    ):
        transpiler.get_startup_program(ONE, startup_program=other)


def test_a_new_startup_program_becomes_one_that_prepares_the_trainer():
    main, startup = captured(), Program()
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program=main, pservers=[ONE, TWO], trainers=2, startup_program=startup)
    assert (startup.part, startup.source) == ("startup", main.source)
    check_unedited(startup)


def test_a_clone_of_the_captured_startup_program_is_accepted():
    program = captured()
    assert program.startup_program is not None
    held = program.startup_program.clone()
    transpiler = transpiled(program)
    with pytest.warns(DeprecationWarning, match="startup_program is not needed"):
        found = transpiler.get_startup_program(ONE, startup_program=held)
    assert found == transpiler.get_startup_program(ONE)


@pytest.mark.parametrize(
    ("asked", "configured", "expected"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_wait_port_needs_both_and_holds_for_the_startup_program_too(asked, configured, expected):
    transpiler = transpiled(wait_port=configured)
    program = transpiler.get_trainer_program(wait_port=asked)
    assert trainer_plan(program).wait_port is expected
    assert program.startup_program is not None
    assert trainer_plan(program.startup_program).wait_port is expected


def test_wait_port_of_the_config_reaches_a_startup_program_that_runs_first():
    program = captured()
    transpiled(program, wait_port=False)
    assert program.startup_program is not None
    assert trainer_plan(program.startup_program).wait_port is False
