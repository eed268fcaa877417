"""Programs of collective training: a trainer's computation, and its communication with the others.

The programs are descriptions only. `fleet.collective` does the same work, with the gradients in buckets.
"""

from collections.abc import Iterable, Sequence

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import TranspileError
from fleet.fluid.ir import Attribute, Block, OpRole, Variable
from fleet.fluid.program import Program, startup_program, step_program
from fleet.options import Where, refusal
from fleet.plan.config import DistributeTranspilerConfig
from fleet.plan.job import CollectivePlan
from fleet.plan.spec import TrainingSpec

__all__ = [
    "COLLECTIVE_MODES",
    "collective_program",
    "collective_startup",
    "plan_collective",
    "refuse_argument",
]

COLLECTIVE_MODES = ("nccl2", "collective")
_DIST = int(OpRole.DIST)


def plan_collective(
    spec: TrainingSpec,
    config: DistributeTranspilerConfig,
    trainer_id: int,
    trainers: str | Iterable[str] | int,
    current_endpoint: str,
    arguments: Iterable[tuple[str, object, object]],
) -> CollectivePlan:
    """Return the plan of a collective job for training with an executor.

    Parameters
    ----------
    spec : TrainingSpec
    config : DistributeTranspilerConfig
        Its `mode` is one of `COLLECTIVE_MODES`.
    trainer_id : int
    trainers : str or iterable of str
        Every trainer's endpoint, ``host:port``, by number.
    current_endpoint : str
        This trainer's endpoint.
    arguments : iterable of tuple
        The transpiler's other arguments: name in `fleet.options`, value, default.

    Raises
    ------
    TranspileError
        An argument or a field is invalid or not supported.
    """
    endpoints = _endpoints(config.mode, trainers)
    config.check_collective()
    for argument in arguments:
        refuse_argument(*argument)
    _check_number(trainer_id, current_endpoint, endpoints)
    mode = config.collective_mode or "grad_allreduce"
    return CollectivePlan(spec, config.mode, mode, tuple(endpoints), trainer_id)


def collective_program(plan: CollectivePlan, origin: Program | None = None) -> Program:
    """Return the program that a trainer of a collective job runs in each step.

    Parameters
    ----------
    plan : CollectivePlan
    origin : Program, optional
        The program that is transpiled, if it was built with layers.
    """
    program = step_program(plan.spec) if origin is None else origin.shallow_copy()
    if plan.form == "collective" and plan.collective_mode == "local_sgd":
        _average_parameters(program.global_block(), len(plan.endpoints))
    elif plan.form == "collective":
        _average_gradients(program.global_block(), len(plan.endpoints))
    program.plan, program.attrs, program.origin = plan, _attributes(plan), origin
    return program


def collective_startup(plan: CollectivePlan, origin: Program | None = None) -> Program:
    """Return a collective trainer's startup program, which connects it to the other trainers."""
    if origin is None:
        program = startup_program(plan.spec)
    else:
        program = (origin.startup_program or Program()).shallow_copy()
    block, endpoints = program.global_block(), list(plan.endpoints)
    if plan.form == "nccl2":
        _meet(block, "gen_nccl_id", "NCCLID", plan.trainer_id, endpoints)
    else:
        _start_up(block, [parameter.name for parameter in plan.spec.parameters], plan.trainer_id, endpoints)
    program.plan, program.attrs, program.origin = plan, _attributes(plan), origin
    return program


def _attributes(plan: CollectivePlan) -> dict[str, Attribute]:
    return {
        "role": "collective",
        "trainer_id": plan.trainer_id,
        "trainers": len(plan.endpoints),
        "endpoints": list(plan.endpoints),
        "collective_mode": plan.collective_mode,
    }


def _check_number(trainer_id: int, current_endpoint: str, endpoints: Sequence[str]) -> None:
    if isinstance(trainer_id, bool) or not isinstance(trainer_id, int):
        raise TranspileError(f"trainer_id is {trainer_id!r}; expected a whole number")
    if not 0 <= trainer_id < len(endpoints) or endpoints[trainer_id] != current_endpoint:
        raise TranspileError(
            f"trainer_id is {trainer_id} and current_endpoint {current_endpoint!r}; expected the number of "
            f"that endpoint in trainers, counted from 0: {', '.join(endpoints)}"
        )


def refuse_argument(name: str, value: object, default: object) -> None:
    """Raise a TranspileError for an argument that has no meaning in collective training."""
    if (reason := refusal(name, value, default, Where(servers=False, by_executor=True))) is not None:
        raise TranspileError(reason)


def _endpoints(mode: str, trainers: str | Iterable[str] | int) -> list[str]:
    if isinstance(trainers, int):
        reason = refusal("config.mode", mode, "pserver", Where(servers=True))
        raise TranspileError(
            f"{reason}. A transpiler that is called by hand takes it, and then every trainer's endpoint as "
            f"trainers, host:port, comma separated: trainers is {trainers!r}"
        )
    endpoints = split_endpoints(trainers)
    if (problem := endpoints_problem(endpoints)) is not None:
        raise TranspileError(
            f"trainers is {trainers!r}: {problem}; expected host:port, comma separated, each trainer once"
        )
    return endpoints


def _meet(block: Block, kind: str, name: str, trainer_id: int, endpoints: list[str]) -> None:
    """Append the operators that connect a trainer to the other trainers."""
    others: list[Attribute] = [each for each in endpoints if each != endpoints[trainer_id]]
    block.create_var(Variable(name, (1,), "uint8", persistable=True))
    named: dict[str, Attribute] = (
        {"endpoint_list": others, "trainer_id": trainer_id}
        if kind == "gen_nccl_id"
        else {"other_endpoints": others, "rank": trainer_id}
    )
    slot = "NCCLID" if kind == "gen_nccl_id" else "Out"
    block.append_op(
        kind, outputs={slot: [name]}, attrs={"endpoint": endpoints[trainer_id], "op_role": _DIST, **named}
    )


def _start_up(block: Block, names: list[str], trainer_id: int, endpoints: list[str]) -> None:
    _meet(block, "c_gen_nccl_id", "nccl_id_0", trainer_id, endpoints)
    ring: dict[str, Attribute] = {"ring_id": 0, "op_role": _DIST}
    block.append_op(
        "c_comm_init", {"X": ["nccl_id_0"]}, attrs={"nranks": len(endpoints), "rank": trainer_id, **ring}
    )
    for name in names:
        block.append_op("c_broadcast", {"X": [name]}, {"Out": [name]}, {"root": 0, **ring})
    block.append_op("c_sync_comm_stream", {"X": names}, {"Out": names}, ring)


def _average_gradients(block: Block, num_trainers: int) -> None:
    """Insert operators that average each gradient over the trainers, after the operator that computes it."""
    gradients = {f"{parameter.name}@GRAD" for parameter in block.all_parameters()}
    computation, block.ops[:] = list(block.ops), []
    last = {
        name: at for at, op in enumerate(computation) for name in op.output_arg_names if name in gradients
    }
    synced = False
    for at, op in enumerate(computation):
        if op.attrs.get("op_role") == OpRole.OPTIMIZE and not synced:
            synced = True
            names = sorted(last)
            block.append_op(
                "c_sync_comm_stream", {"X": names}, {"Out": names}, {"ring_id": 0, "op_role": _DIST}
            )
        block.ops.append(op)
        for name in op.output_arg_names:
            if last.get(name) == at:
                _append_mean(block, name, num_trainers)


def _average_parameters(block: Block, num_trainers: int) -> None:
    """Append operators that average each parameter over the trainers, after the optimizer's operators."""
    for parameter in block.all_parameters():
        _append_mean(block, parameter.name, num_trainers)


def _append_mean(block: Block, name: str, num_trainers: int) -> None:
    block.append_op("scale", {"X": [name]}, {"Out": [name]}, {"scale": 1.0 / num_trainers, "op_role": _DIST})
    block.append_op("c_allreduce_sum", {"X": [name]}, {"Out": [name]}, {"ring_id": 0, "op_role": _DIST})
