"""What the processes of one job must have in common before they may train together.

An agreement is a flat mapping from the name of a fact to its text, so that two processes that differ can
say in what. A fingerprint is its digest: cheap to compare, equal on every platform and Python version.
"""

import hashlib
import json
from collections.abc import Mapping

from fleet.program.clip import CLIP_TYPES, describe_clip
from fleet.program.ir import Operator, ProgramData
from fleet.program.optimizers import KERNEL_FLAGS, hyper_parameters_of
from fleet.program.tables import LOOK_UP_TYPE

__all__ = ["agreement_of", "describe_difference", "facts_of_training", "fingerprint_of"]

_ABSENT = "nothing"
_OF_TRAINING = ("parameter ", "optimizer of ", "table ")


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


def facts_of_training(agreement: Mapping[str, str]) -> dict[str, str]:
    """Return what of an agreement is about the model and its optimizer, and not about the cluster."""
    return {fact: text for fact, text in agreement.items() if fact.startswith(_OF_TRAINING)}


def _optimizer(op: Operator) -> str:
    # Kernel flags follow the device, and a server may have another than a trainer.
    structural = {
        name: value
        for name, value in sorted(hyper_parameters_of(op).items())
        if name not in KERNEL_FLAGS and (value is None or isinstance(value, bool | str))
    }
    options = ", ".join(f"{name}={value}" for name, value in structural.items())
    return f"{op.type}: {op.attr('optimizer')}({options})"


def fingerprint_of(agreement: Mapping[str, str]) -> str:
    """Return the SHA-256 of an agreement in hexadecimal."""
    canonical = json.dumps(dict(agreement), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe_difference(ours: Mapping[str, str], theirs: Mapping[str, str], *, at_most: int = 3) -> str:
    """Say in one clause how two agreements differ; empty when they do not.

    Parameters
    ----------
    ours, theirs : mapping of fact to text
    at_most : int
        How many differing facts to spell out.

    Returns
    -------
    str
        ``trainers: 2 here, 3 there; …``, with the number of facts left out.
    """
    facts = [*ours, *(fact for fact in theirs if fact not in ours)]
    differing = [fact for fact in facts if ours.get(fact) != theirs.get(fact)]
    clauses = [
        f"{fact}: {ours.get(fact, _ABSENT)} here, {theirs.get(fact, _ABSENT)} there"
        for fact in differing[:at_most]
    ]
    if len(differing) > at_most:
        clauses.append(f"and {len(differing) - at_most} more")
    return "; ".join(clauses)
