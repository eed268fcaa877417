"""Variables for tests of feeding, and conversions of programs and feeds to golden-file form."""

from collections.abc import Mapping
from typing import Any

from fleet.fluid.ir import Operator, Variable
from fleet.fluid.lod import LoDTensor


def data(name: str, shape: list[int], dtype: str = "float32", lod_level: int = 0) -> Variable:
    """Return a program variable with a batch dimension in front of `shape`."""
    return Variable(name, (-1, *shape), dtype, is_data=True, lod_level=lod_level)


def recorded_feeds(
    arrays: Mapping[str, Any], case: str, lengths: Mapping[str, Any], steps: int
) -> list[dict[str, Any]]:
    """Return the recorded feed of each step.

    For a variable in `lengths`, the array concatenates the sequences of all steps; for any other variable, it
    has one row for each step.
    """
    feeds: list[dict[str, Any]] = [{} for _ in range(steps)]
    for key, array in arrays.items():
        if not key.startswith(f"{case}/in/"):
            continue
        name, begin = key.rpartition("/")[2], 0
        for step, feed in enumerate(feeds):
            if name in lengths:
                level = lengths[name][step]
                end = begin + sum(level[-1])
                feed[name], begin = LoDTensor(array[begin:end], level), end
            else:
                feed[name] = array[step]
    return feeds


def described(op: Operator) -> dict[str, Any]:
    """Return an operator in golden-file form."""
    slots = [{slot: list(names) for slot, names in each.items()} for each in (op.inputs, op.outputs)]
    return {"type": op.type, "inputs": slots[0], "outputs": slots[1], "attrs": dict(op.attrs)}


def facts(variable: Any) -> dict[str, Any]:
    """Return a variable in golden-file form."""
    if variable.type == "STEP_SCOPES":  # not a tensor
        return {"type": variable.type}
    found = {
        "type": variable.type,
        "persistable": variable.persistable,
        "stop_gradient": variable.stop_gradient,
        "shape": list(variable.shape),
        "dtype": variable.dtype,
    }
    if variable.lod_level:
        found["lod_level"] = variable.lod_level
    if variable.is_parameter:
        found |= {"parameter": True, "trainable": variable.trainable}
        found["learning_rate"] = variable.learning_rate
        if getattr(variable, "regularizer", None) is not None:
            found["regularizer"] = str(variable.regularizer)
    return found


def as_recorded(program: Any) -> list[dict[str, Any]]:
    """Return a program's blocks in golden-file form."""
    return [
        {
            "parent": block.parent_idx,
            "ops": [described(op) for op in block.ops],
            "vars": {name: facts(block.vars[name]) for name in sorted(block.vars)},
        }
        for block in program.blocks
    ]


def check_blocks(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that a program's blocks equal those of a golden file, comparing operator types first."""
    for each, golden in zip(found, expected, strict=True):
        assert [op["type"] for op in each["ops"]] == [op["type"] for op in golden["ops"]]
        assert each["ops"] == golden["ops"]
        assert each["vars"] == golden["vars"]
        assert each["parent"] == golden["parent"]
