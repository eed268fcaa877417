"""Renders plans as programs, and checks that a program still matches its plan.

The runtime follows the plan that a program carries, and not its operators. An edited program is therefore
refused before it runs: the runtime would ignore the edits.
"""

from itertools import zip_longest

from fleet.errors import TranspileError
from fleet.fluid import built_programs
from fleet.fluid.collective_program import collective_program, collective_startup
from fleet.fluid.ir import Block, Operator
from fleet.fluid.program import Program, startup_program, step_program
from fleet.fluid.pserver_program import pserver_program, pserver_startup
from fleet.fluid.trainer_program import trainer_program, trainer_startup
from fleet.plan.job import CollectivePlan, JobPlan, ServerPlan, TrainerPlan
from fleet.plan.spec import TrainingSpec

__all__ = [
    "check_unedited",
    "render_pserver",
    "render_trainer",
    "rendered",
    "server_plan",
    "trainer_plan",
]

_REMEDY = (
    "; a program shows its plan, and editing it changes nothing that is run: change the model, the optimizer "
    "or the config before transpile(), and run the program that it makes"
)


def rendered(program: Program) -> Program:
    """Render a program's plan again, and return the resulting program."""
    plan, startup, origin = program.plan, program.part == "startup", program.origin
    if isinstance(plan, TrainingSpec):
        return startup_program(plan) if startup else step_program(plan)
    if isinstance(plan, CollectivePlan):
        expected = collective_startup(plan, origin) if startup else collective_program(plan, origin)
        if "wait_port" in program.attrs:  # get_trainer_program() adds this attribute
            expected.attrs["wait_port"] = True
        return expected
    if not isinstance(plan, JobPlan):
        raise TranspileError("the program has no plan; make it with Program.capture, and transpile it")
    if program.attrs.get("role") == "pserver":
        endpoint = str(program.attrs.get("endpoint"))
        if endpoint not in plan.endpoints:
            raise TranspileError(
                f"the program's attribute endpoint is {endpoint!r}; "
                f"expected one of {', '.join(plan.endpoints)}"
            )
        return render_pserver(plan, endpoint, origin)[int(startup)]
    trainer_id, wait_port = program.attrs.get("trainer_id"), bool(program.attrs.get("wait_port"))
    if isinstance(trainer_id, bool) or not isinstance(trainer_id, int) or not 0 <= trainer_id < plan.trainers:
        raise TranspileError(
            f"the program's attribute trainer_id is {trainer_id!r}; expected a whole number from 0 to "
            f"{plan.trainers - 1}"
        )
    return render_trainer(plan, trainer_id, origin, wait_port=wait_port)[int(startup)]


def render_trainer(
    plan: JobPlan, trainer_id: int, origin: Program | None, *, wait_port: bool = True
) -> tuple[Program, Program]:
    """Return a trainer's main program and startup program.

    Parameters
    ----------
    plan : JobPlan
    trainer_id : int
    origin : Program or None
        The program that was transpiled, if it was built with layers.
    wait_port : bool
        False: do not wait for the servers' ports, even if the plan requests it.
    """
    if origin is None:
        main = trainer_program(plan, trainer_id, wait_port=wait_port)
        return main, trainer_startup(plan, trainer_id, wait_port=wait_port)
    main = built_programs.trainer_program(origin, plan, trainer_id, wait_port=wait_port)
    return main, built_programs.trainer_startup(origin, plan, trainer_id, wait_port=wait_port)


def render_pserver(plan: JobPlan, endpoint: str, origin: Program | None) -> tuple[Program, Program]:
    """Return a parameter server's main program and startup program.

    Parameters
    ----------
    plan : JobPlan
    endpoint : str
        One of the plan's endpoints.
    origin : Program or None
        As for `render_trainer`.
    """
    if origin is None or plan.geo:  # in GEO, servers add changes and have no optimizer
        return pserver_program(plan, endpoint), pserver_startup(plan, endpoint)
    return (
        built_programs.pserver_program(origin, plan, endpoint),
        built_programs.pserver_startup(origin, plan, endpoint),
    )


def check_unedited(program: Program) -> None:
    """Raise an error if a program no longer matches its plan.

    Raises
    ------
    TranspileError
        The program differs; the message names the first operator, variable or attribute that differs.
    """
    known = program.checked
    # This runs in each step, so it is fast for a checked program: its operators are the same objects as
    # before. A change within the attributes of an operator is therefore found only in the first check.
    if (
        known is not None
        and known.plan is program.plan
        and known.blocks == program.blocks
        and known.attrs == program.attrs
    ):
        return
    expected = rendered(program)
    if isinstance(program.plan, TrainingSpec):
        expected.attrs = program.attrs  # transpile() adds attributes there
    if difference := _difference(program, expected):
        raise TranspileError(f"the program was edited: {difference}{_REMEDY}")
    known = program.checked = program.shallow_copy()
    known.plan, known.attrs = program.plan, dict(program.attrs)


def _difference(program: Program, expected: Program) -> str:
    """Describe the first difference between a program and the expected one; empty if they are equal."""
    if len(program.blocks) != len(expected.blocks):
        return f"it has {len(program.blocks)} blocks, expected {len(expected.blocks)}"
    for ours, theirs in zip(program.blocks, expected.blocks, strict=True):
        for position, (found, planned) in enumerate(zip_longest(ours.ops, theirs.ops)):
            if found != planned:
                return _operator_difference(ours, position, found, planned)
        for name in (*ours.vars, *theirs.vars):
            if ours.vars.get(name) != theirs.vars.get(name):
                return f"variable {name} of block {ours.idx} is {ours.vars.get(name) or 'missing'}"
        if list(ours.vars) != list(theirs.vars) or ours.parent_idx != theirs.parent_idx:
            return f"block {ours.idx} has another parent, or its variables in another order"
    for name in (*program.attrs, *expected.attrs):
        if program.attrs.get(name) != expected.attrs.get(name):
            return f"attribute {name} is {program.attrs.get(name)!r}, expected {expected.attrs.get(name)!r}"
    return ""


def _operator_difference(
    block: Block, position: int, found: Operator | None, planned: Operator | None
) -> str:
    place = f"at position {position} of block {block.idx}"
    if found is None:
        return f"{_name(planned)} is missing {place}"
    if planned is None:
        return f"{_name(found)} stands {place}, where no operator is planned"
    if found.type != planned.type or found.attrs.get("op_role_var") != planned.attrs.get("op_role_var"):
        return f"{_name(found)} stands {place}, expected {_name(planned)}"
    for name in (*found.attrs, *planned.attrs):
        if found.attrs.get(name) != planned.attrs.get(name):
            return (
                f"{_name(found)} {place} has {name} = {found.attrs.get(name)!r}, "
                f"expected {planned.attrs.get(name)!r}"
            )
    return f"{_name(found)} {place} reads or writes other variables than planned"


def _name(op: Operator | None) -> str:
    """Return an operator's name for messages: its type and its parameter."""
    if op is None:
        return "no operator"
    about = op.attrs.get("op_role_var")
    return f"operator {op.type} of {about[0]}" if isinstance(about, list) else f"operator {op.type}"


def trainer_plan(program: Program) -> TrainerPlan:
    """Return the plan of the trainer for which a program was transpiled.

    Parameters
    ----------
    program : Program
        The result of `DistributeTranspiler.get_trainer_program`, or its startup program.

    Raises
    ------
    TranspileError
        The program is not a trainer's, was edited, or lacks something that its plan needs.
    """
    plan = _job_plan(program, "trainer", "get_trainer_program()")
    return plan.trainer(
        program.attr("trainer_id"), program.source, program.mode, wait_port=program.attr("wait_port")
    )


def server_plan(program: Program) -> ServerPlan:
    """Return the plan of the parameter server for which a program was transpiled.

    Parameters
    ----------
    program : Program
        The result of `DistributeTranspiler.get_pserver_program`.

    Raises
    ------
    TranspileError
        As for `trainer_plan`.
    """
    plan = _job_plan(program, "pserver", "get_pserver_program(endpoint)")
    return plan.server(program.attr("endpoint"), program.source, program.mode)


def _job_plan(program: Program, role: str, made_by: str) -> JobPlan:
    found = program.attrs.get("role")
    if found != role or not isinstance(program.plan, JobPlan):
        raise TranspileError(
            f"expected a {role}'s program, found {f'one of a {found}' if found else 'one not transpiled'}; "
            f"run what DistributeTranspiler.{made_by} returned"
        )
    check_unedited(program)
    return program.plan
