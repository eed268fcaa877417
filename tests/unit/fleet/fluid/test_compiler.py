"""Settings of Paddle's own executor are accepted, logged once, and have no effect."""

import logging

import pytest

from fleet import fluid
from fleet.errors import ConfigurationError


def test_settings_are_accepted_and_said_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "fleet.fluid.compiler")
    for _ in range(2):
        strategy = fluid.BuildStrategy()
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
        assert strategy.reduce_strategy is fluid.BuildStrategy.ReduceStrategy.Reduce
        assert strategy.memory_optimize is None
        threads = fluid.ExecutionStrategy()
        threads.num_threads = 4
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said))
    assert {message.split(" has no effect")[0] for message in said} == {
        "BuildStrategy.reduce_strategy",
        "ExecutionStrategy.num_threads",
    }


def test_a_compiled_program_is_the_program():
    program = fluid.Program()
    compiled = fluid.CompiledProgram(program)
    assert compiled.with_data_parallel(loss_name="loss", places=[fluid.CPUPlace()]) is compiled
    assert fluid.compiler.uncompiled(compiled) is program


def test_several_places_are_refused():
    with pytest.raises(ConfigurationError, match=r"2 places; expected one: .* fleet\.launch"):
        fluid.CompiledProgram(fluid.Program()).with_data_parallel(places=[fluid.CPUPlace()] * 2)
    with pytest.raises(ConfigurationError, match="CompiledProgram of 'x'; expected a Program"):
        fluid.CompiledProgram("x")  # type: ignore[arg-type]
