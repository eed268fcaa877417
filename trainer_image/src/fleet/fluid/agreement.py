"""What a captured program says that the processes of one job must have in common."""

from fleet.fluid.clip import CLIP_TYPES, describe_clip
from fleet.fluid.ir import Operator, ProgramData
from fleet.fluid.optimizers import hyper_parameters_of
from fleet.fluid.tables import LOOK_UP_TYPE
from fleet.plan.optimizers import KERNEL_FLAGS

__all__ = ["agreement_of"]


def agreement_of(program: ProgramData) -> dict[str, str]:
    """Return what a captured program says about its parameters and their optimizers.

    Names, shapes, dtypes and param groups of the parameters; what each table is; class and structural
    hyper-parameters of the optimizer, which are those that are not numbers. Numbers, as the learning rate,
    may change during training and are compared step by step instead. And how gradients are clipped, if they
    are.
    """
    block = program.global_block()
    agreement: dict[str, str] = {}
    for op in block.ops:
        if op.type in CLIP_TYPES:
            agreement["grad_clip"] = describe_clip(op)
        if op.type == LOOK_UP_TYPE and op.has_attr("table"):
            agreement[f"table {op.input('W')[0]}"] = op.attr("table")
        if not op.has_attr("optimizer"):
            continue
        (name,) = op.input("Param")
        variable, group = block.var(name), op.attr("param_group")
        shape = ", ".join(map(str, variable.shape))
        agreement[f"parameter {name}"] = f"{variable.dtype}[{shape}] in param group {group}"
        agreement[f"optimizer of param group {group}"] = _optimizer(op)
    return agreement


def _optimizer(op: Operator) -> str:
    # Kernel flags follow the device, and a server may have another than a trainer.
    structural = {
        name: value
        for name, value in sorted(hyper_parameters_of(op).items())
        if name not in KERNEL_FLAGS and (value is None or isinstance(value, bool | str))
    }
    options = ", ".join(f"{name}={value}" for name, value in structural.items())
    return f"{op.type}: {op.attr('optimizer')}({options})"
