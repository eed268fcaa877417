"""Programs as JSON: a written program is read unchanged, and an error for a damaged one has the position."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler, Program, Variable
from fleet.fluid.render import server_plan, trainer_plan
from fleet.plan import DistributeTranspilerConfig
from tests.support.programs import Parameters, captured, never

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"

names = st.text("abcXY@._01", min_size=1, max_size=8)
plain = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
attributes = st.dictionaries(names, plain, max_size=3)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of any shape that `append_op` accepts, and its startup program."""
    program = Program()
    for index in range(draw(st.integers(1, 3))):
        block = program.create_block(draw(st.integers(0, index - 1))) if index else program.global_block()
        declared = draw(st.lists(names, min_size=1, max_size=4, unique=True))
        for name in declared:
            shape = tuple(draw(st.lists(st.integers(-1, 9), max_size=3)))
            dtype = draw(st.sampled_from(["float32", "bfloat16", "any"]))
            block.create_var(
                Variable(name, shape, dtype, draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
            )
        slots = st.dictionaries(names, st.lists(st.sampled_from(declared), max_size=3), max_size=2)
        for _ in range(draw(st.integers(0, 3))):
            block.append_op(draw(names), draw(slots), draw(slots), draw(attributes))
    program.attrs = draw(attributes)
    if draw(st.booleans()):
        program.startup_program = draw(programs())
        program.startup_program.startup_program = None
    return program


@settings(max_examples=50)
@given(programs())
def test_what_is_written_comes_back(program):
    again = Program.from_json(program.to_json())
    assert again == program
    assert again.startup_program == program.startup_program
    assert again.to_string(with_details=True) == program.to_string(with_details=True)
    assert again.to_json() == program.to_json()
    assert again.source is None


@settings(max_examples=50)
@given(programs(), programs())
def test_a_difference_is_said_where_there_is_one_and_only_there(one, other):
    assert one.difference(one.clone()) == ""
    assert bool(one.difference(other)) == (one != other)


def test_a_difference_reads_line_by_line():
    ours, theirs = captured({"w": (2, 3)}), captured({"w": (2, 3)}, momentum=0.9)
    said = ours.difference(theirs).splitlines()
    assert said[:2] == ["--- this program", "+++ the other"]
    assert [line for line in said if line.startswith("+") and "persist" in line] == [
        "+    persist w_velocity_0 : float32[2, 3]"
    ]
    (removed,) = [line for line in said if line.startswith("-") and "sgd(" in line]
    (added,) = [line for line in said if line.startswith("+") and "momentum(" in line]
    assert "momentum=0," in removed
    assert "mu=0.9" in added


def transpiled() -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig())
    program = captured(optimizer="Adam", weight_decay=0.01, betas=(0.1, 0.2))
    transpiler.transpile(0, program=program, pservers=[ONE, TWO], trainers=2)
    return transpiler


def test_a_transpiled_program_that_was_read_back_has_the_originals_plan():
    transpiler = transpiled()
    trainer = transpiler.get_trainer_program()
    read = Program.from_json(trainer.to_json())
    assert trainer_plan(read) == trainer_plan(trainer)
    assert read.startup_program is not None
    assert trainer.startup_program is not None
    assert trainer_plan(read.startup_program) == trainer_plan(trainer.startup_program)
    for endpoint in (ONE, TWO):
        server = transpiler.get_pserver_program(endpoint)
        read = Program.from_json(server.to_json())
        assert server_plan(read) == server_plan(server)
        assert (read.to_string(), read.startup_program) == (server.to_string(), server.startup_program)


def test_a_program_that_was_read_runs_again_with_a_source():
    class Mine(torch.optim.SGD): ...

    module = Parameters({"w": (3,)})
    program = Program.capture(module, never, Mine(module.parameters(), lr=0.1))
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program=program, pservers=ONE)
    read = Program.from_json(transpiler.get_pserver_program(ONE).to_json())
    with pytest.raises(
        TranspileError, match=r"Mine, a class that neither .* program\.source = captured\.source"
    ):
        server_plan(read)
    read.source = program.source
    assert server_plan(read).groups[0].optimizer_class is Mine


def test_a_text_that_is_cut_off_anywhere_is_refused():
    text = captured({"w": (2,)}).to_json()
    for end in range(0, len(text), 7):
        with pytest.raises(TranspileError, match=r"the text is not JSON: .*(characters long|empty)"):
            Program.from_json(text[:end])
    with pytest.raises(TranspileError, match=r"the text is not JSON: .*Extra data"):
        Program.from_json(f"{text} {text}")


def first_op(document: dict[str, Any]) -> Any:
    return document["blocks"][0]["ops"][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda d: d.pop("format"), "not a program: expected .*'fleet-program'", id="foreign"),
        pytest.param(lambda d: d.update(version=7), "version 7 .* reads version 2", id="newer"),
        pytest.param(lambda d: d.update(version=1), "version 1 .* version 2", id="no-plans"),
        pytest.param(lambda d: d.pop("version"), "version None", id="no-version"),
        pytest.param(lambda d: d.update(part="end"), "part is 'end'; expected one of main", id="part"),
        pytest.param(lambda d: d.update(plan=[]), r"plan is \[\]; expected an object", id="plan"),
        pytest.param(lambda d: d.pop("attrs"), "the program is an object .*expected attrs too", id="gap"),
        pytest.param(lambda d: d.update(extra=1), "the program, extra is 1; expected nothing", id="beside"),
        pytest.param(lambda d: d.update(blocks=[]), r"blocks is \[\]; expected at least", id="no-blocks"),
        pytest.param(lambda d: d.update(attrs=[]), r"attrs is \[\]; expected an object", id="attrs"),
        pytest.param(
            lambda d: d["blocks"][0].update(parent=0), "block 0, parent is 0; expected -1", id="parent"
        ),
        pytest.param(
            lambda d: d["blocks"].append({"parent": 1, "vars": [], "ops": []}),
            "block 1, parent is 1; .* an earlier block",
            id="its-own-parent",
        ),
        pytest.param(
            lambda d: d["blocks"][0].update(parent=True), "parent is True; expected a whole number", id="flag"
        ),
        pytest.param(
            lambda d: d["blocks"][0]["vars"][0].update(shape=[1.5]),
            r"block 0, variable 0, shape is \[1\.5\]; expected a list of whole numbers",
            id="shape",
        ),
        pytest.param(
            lambda d: d["blocks"][0]["vars"].append(d["blocks"][0]["vars"][0]),
            "variable .: block 0 already has a variable 'x'",
            id="declared-twice",
        ),
        pytest.param(
            lambda d: first_op(d).update(inputs={"X": ["nowhere"]}),
            "block 0, operator 0: block 0 has no variable 'nowhere'",
            id="undeclared",
        ),
        pytest.param(
            lambda d: first_op(d).update(outputs={"Out": "x"}),
            "operator 0, outputs, Out is 'x'; expected a list of variables' names",
            id="slot",
        ),
        pytest.param(lambda d: first_op(d).update(type=3), "type is 3; expected a text", id="type"),
        pytest.param(
            lambda d: d.update(startup_program={}), "startup_program is an object with nothing", id="startup"
        ),
    ],
)
def test_what_is_no_whole_program_is_refused_with_its_place(damage, message):
    document = json.loads(captured({"w": (2,)}).to_json())
    damage(document)
    with pytest.raises(TranspileError, match=message):
        Program.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"not a program: .* found \[\]"),
        ("3", "not a program: .* found 3"),
        ('{"apiVersion": "v1"}', "found an object with apiVersion"),
        ("", "it is empty"),
        (None, "it is a NoneType"),
    ],
)
def test_foreign_texts_are_refused(text, message):
    with pytest.raises(TranspileError, match=message):
        Program.from_json(text)


def test_attributes_that_are_no_plain_values_are_refused():
    program = Program()
    program.global_block().append_op("odd", attrs={"value": object()})  # type: ignore[dict-item]
    with pytest.raises(TranspileError, match="cannot be written as JSON: Object of type object"):
        program.to_json()
