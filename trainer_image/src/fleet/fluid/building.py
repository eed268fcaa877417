"""The variables and operators of programs that scripts build with layers.

The other modules of `fleet.fluid` rely on these facts:

- A `ProgramVariable` has `name`, `shape` (-1 for the size of the batch), `dtype` as text, `lod_level`,
  `stop_gradient`, `persistable`, `is_parameter`, `is_data` and `block`; a parameter also has `trainable`,
  `learning_rate` and `regularizer`. Only `stop_gradient` and `persistable` may be assigned.
- A `Layer` names the variables of one layer, and appends operators with their outputs. Within a ``with``
  block of `ProgramData.roles`, these operators get another role. `Layer.parameter` creates a parameter and
  its initial value.
- An initializer has ``operator(shape, dtype, seed)``, which returns the type and the attributes of the
  operator of the startup program.
- Feeds map the names of data to arrays or to `fleet.fluid.lod.LoDTensor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from fleet.errors import TranspileError
from fleet.fluid import unique_name
from fleet.fluid.initializer import default_bias, default_weight
from fleet.fluid.ir import Attribute, Block, ProgramData, Variable
from fleet.fluid.operators.kinds import Kind, kind_of
from fleet.fluid.param_attr import param_attr
from fleet.fluid.program import Program, default_main_program, default_startup_program

__all__ = [
    "Layer",
    "ProgramVariable",
    "append_operator",
    "create_variable",
    "equals",
    "start_with",
]

_END = 10_000_000
"""The end index that Paddle writes for a range without an end."""
_ASSIGNED = frozenset({"block", "stop_gradient", "persistable", "regularizer", "initializer"})


class ProgramVariable(Variable):
    """A variable of a built program; arithmetic on it appends operators.

    Notes
    -----
    Paddle's ``fluid.framework.Variable``, and for parameters its ``fluid.framework.Parameter``.
    """

    block: Block
    regularizer: Any = None
    initializer: Any = None

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; reject attributes that are fixed at creation."""
        if name not in _ASSIGNED:
            raise AttributeError(
                f"variable {self.name}: {name} cannot be changed after the variable has been created; only "
                "stop_gradient and persistable may be assigned"
            )
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash(self.name)

    def stop(self) -> None:
        """Stop gradients at this variable."""
        object.__setattr__(self, "stop_gradient", True)

    def copied(self, block: Block, **changes: Any) -> Self:
        """Return a copy of this variable for another block."""
        copy = replace(self, **changes)
        copy.block, copy.regularizer, copy.initializer = block, self.regularizer, self.initializer
        return copy

    @property
    def program(self) -> ProgramData:
        """The program to which the variable belongs."""
        return self.block.program

    def astype(self, dtype: str) -> "ProgramVariable":
        """Append a cast to another dtype, and return its output."""
        out = _temporary(self, dtype)
        append_operator(
            self.block, "cast", {"X": self}, {"in_dtype": self.dtype, "out_dtype": dtype}, {"Out": out}
        )
        return out

    def __add__(self, other: Any) -> "ProgramVariable":
        return _scaled(self, 1.0, other) or _binary("elementwise_add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "ProgramVariable":
        return _scaled(self, 1.0, other, sign=-1.0) or _binary("elementwise_sub", self, other)

    def __rsub__(self, other: Any) -> "ProgramVariable":
        return _scaled(self, -1.0, other) or _binary("elementwise_sub", self, other, reverse=True)

    def __mul__(self, other: Any) -> "ProgramVariable":
        if isinstance(other, int | float):
            return _scale(self, float(other), 0.0)
        return _binary("elementwise_mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "ProgramVariable":
        if isinstance(other, int | float) and not self.dtype.startswith(("int", "uint")):
            return _scale(self, 1.0 / other, 0.0)
        return _binary("elementwise_div", self, other)

    def __rtruediv__(self, other: Any) -> "ProgramVariable":
        return _binary("elementwise_div", self, other, reverse=True)

    def __pow__(self, other: Any) -> "ProgramVariable":
        return _binary("elementwise_pow", self, other)

    def __rpow__(self, other: Any) -> "ProgramVariable":
        return _binary("elementwise_pow", self, other, reverse=True)

    def __getitem__(self, item: Any) -> "ProgramVariable":
        """Select a range, or one position, along each of the first dimensions."""
        return _selected(self, item if isinstance(item, tuple) else (item,))

    __iter__ = None
    """None, because Python would otherwise iterate by calling `__getitem__` without end."""

    def __neg__(self) -> "ProgramVariable":
        return _scale(self, -1.0, 0.0)

    def __lt__(self, other: Any) -> "ProgramVariable":
        return _binary("less_than", self, other, dtype="bool")

    def __le__(self, other: Any) -> "ProgramVariable":
        return _binary("less_equal", self, other, dtype="bool")

    def __gt__(self, other: Any) -> "ProgramVariable":
        return _binary("greater_than", self, other, dtype="bool")

    def __ge__(self, other: Any) -> "ProgramVariable":
        return _binary("greater_equal", self, other, dtype="bool")

    def __floordiv__(self, other: Any) -> "ProgramVariable":
        return _binary("elementwise_floordiv", self, other)

    def __mod__(self, other: Any) -> "ProgramVariable":
        return _binary("elementwise_mod", self, other)

    __div__, __rdiv__ = __truediv__, __rtruediv__


def equals(x: ProgramVariable, y: ProgramVariable) -> ProgramVariable:
    """Append Paddle's operator for ``x == y``, because ``==`` on variables compares their fields."""
    return _binary("equal", x, y, dtype="bool")


def create_variable(
    block: Block, name: str, shape: Sequence[int], dtype: str, **facts: Any
) -> ProgramVariable:
    """Declare a variable in a block, replacing any variable with the same name, as Paddle does.

    Parameters
    ----------
    block : Block
    name : str
    shape : sequence of int
        -1 for a size that is known only at run time.
    dtype : str
    **facts
        Other fields of `Variable`.
    """
    variable = ProgramVariable(name, tuple(int(size) for size in shape), dtype, **facts)
    variable.block = block
    block.vars[name] = variable
    return variable


def _selected(x: ProgramVariable, items: Sequence[Any]) -> ProgramVariable:
    axes, starts, ends, dropped = [], [], [], []
    for axis, item in enumerate(items):
        ranged = isinstance(item, slice)
        given = [item.start, item.stop] if ranged else [item]
        stepped = ranged and item.step not in (None, 1)
        if stepped or not all(isinstance(each, int) or (ranged and each is None) for each in given):
            raise TranspileError(
                f"{x.name}[...]: index {axis} is {item!r}; expected a whole number or a range without a "
                "step. layers.gather selects rows by a variable"
            )
        if isinstance(item, slice):
            start, end = item.start or 0, _END if item.stop is None else item.stop
            if item.start is None and item.stop is None:
                continue
        else:
            start, end = item, _END if item == -1 else item + 1
            dropped.append(axis)
        axes.append(axis)
        starts.append(start)
        ends.append(end)
    if not axes:
        return x
    out = create_variable(_current(x), unique_name.generate(f"{x.name}_slice"), (), x.dtype)
    attrs: dict[str, Any] = {"axes": axes, "starts": starts, "ends": ends, "decrease_axis": dropped}
    append_operator(
        _current(x), "slice", {"Input": x}, {**attrs, "infer_flags": [1] * len(axes)}, {"Out": out}
    )
    return out


def _names(value: Variable | Sequence[Variable] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value.name,) if isinstance(value, Variable) else tuple(each.name for each in value)


def _float32(value: Attribute) -> Attribute:
    """Round a number to float32, the precision of Paddle's attributes."""
    if isinstance(value, float):
        return float(np.float32(value))
    return [_float32(each) for each in value] if isinstance(value, list) else value


def append_operator(
    block: Block,
    type: str,  # noqa: A002 - as in `Block.append_op`
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Attribute],
    outputs: Mapping[str, Variable | Sequence[Variable]],
    *,
    index: int | None = None,
) -> None:
    """Append an operator, and infer the shapes of its outputs.

    Parameters
    ----------
    block : Block
    type : str
    inputs : mapping of slot to variable, variables or None
    attrs : mapping of attribute name to value
        Missing attributes have the defaults of the operator's kind.
    outputs : mapping of slot to variable or variables
    index : int, optional
        The position; by default the end.

    Raises
    ------
    TranspileError
        The operator has no such slot or attribute, or the shapes of its inputs do not fit.
    """
    kind = kind_of(type)
    complete = {name: _float32(attrs.get(name, default)) for name, default in kind.attrs.items()}
    foreign = [*(attrs.keys() - kind.attrs.keys()), *(inputs.keys() - set(kind.inputs))]
    if foreign:
        raise TranspileError(f"operator {type} has no {', '.join(sorted(foreign))}")
    _settle(kind, inputs, complete, outputs)
    role, about = block.program.current_role
    block.insert_op(
        len(block.ops) if index is None else index,
        type,
        {slot: _names(inputs[slot]) for slot in kind.inputs if inputs.get(slot) is not None},
        {slot: _names(variable) for slot, variable in outputs.items()},
        {**complete, "op_role": role, "op_role_var": list(about)},
    )


def _settle(
    kind: Kind, inputs: Mapping[str, Any], attrs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> None:
    """Infer the shapes and LoD levels of an operator's outputs."""
    shapes = {
        slot: each.shape if isinstance(each, Variable) else [one.shape for one in each]
        for slot, each in inputs.items()
        if each is not None
    }
    try:
        found = kind.shapes(shapes, attrs)
    except (IndexError, ValueError, KeyError, ZeroDivisionError) as error:
        given = ", ".join(f"{slot} {shape}" for slot, shape in shapes.items())
        raise TranspileError(
            f"operator {kind.type} cannot be applied to {given}: {error}; expected shapes that fit"
        ) from error
    level = _level(kind, inputs, attrs)
    for at, slot in enumerate(kind.outputs):
        held = outputs.get(slot)
        for variable in held if isinstance(held, list | tuple) else [held]:
            if isinstance(variable, ProgramVariable) and at < len(found):
                object.__setattr__(variable, "shape", tuple(found[at]))
                if not variable.persistable and (slot in kind.shares or slot == "XShape"):
                    object.__setattr__(variable, "lod_level", level)


def _level(kind: Kind, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> int:
    given = inputs.get(kind.lod_slot(attrs))
    first = given if isinstance(given, Variable) or not given else given[0]
    return 0 if first is None else max(int(first.lod_level) - int(kind.drops_level), 0)


class Layer:
    """A helper for one call of a layer, which creates parameters, temporary variables and operators.

    Parameters
    ----------
    type : str
        The kind of layer, which is also the prefix of its name.
    name : str, optional
        The full name, in place of a generated one.

    Notes
    -----
    Paddle's ``LayerHelper``.
    """

    def __init__(self, type: str, name: str | None = None) -> None:  # noqa: A002 - as in `Operator`
        self.name = name if name is not None else unique_name.generate(type)
        self.main = buildable(default_main_program())
        self.startup = buildable(default_startup_program())
        self.block = self.main.current_block()

    def temporary(self, dtype: str, *, stop_gradient: bool = False) -> ProgramVariable:
        """Create a variable for an operator's output; its shape is inferred when the operator is appended."""
        name = unique_name.generate(f"{self.name}.tmp")
        return create_variable(self.block, name, (), dtype, stop_gradient=stop_gradient)

    def append(
        self,
        type: str,  # noqa: A002 - as in `Block.append_op`
        inputs: Mapping[str, Any],
        *,
        outputs: Mapping[str, Any] | None = None,
        stop_gradient: bool = False,
        **attrs: Any,
    ) -> ProgramVariable:
        """Append an operator, and return its first output; see `append_all`."""
        return self.append_all(type, inputs, outputs=outputs, stop_gradient=stop_gradient, **attrs)[0]

    def append_all(
        self,
        type: str,  # noqa: A002 - as in `Block.append_op`
        inputs: Mapping[str, Any],
        *,
        outputs: Mapping[str, Any] | None = None,
        stop_gradient: bool = False,
        **attrs: Any,
    ) -> tuple[ProgramVariable, ...]:
        """Append an operator, creating a variable for each output that is not given.

        Parameters
        ----------
        type : str
        inputs : mapping of slot to variable, variables or None
        outputs : mapping of slot to variable or None, optional
        stop_gradient : bool
            Whether gradients end at new variables.
        **attrs
            Attributes that differ from the defaults of the operator's kind.

        Returns
        -------
        tuple of ProgramVariable
            The outputs, in the order of their slots.
        """
        kind = kind_of(type)
        complete = {**kind.attrs, **attrs}
        made = {slot: given for slot, given in (outputs or {}).items() if given is not None}
        for slot in kind.outputs:
            if slot not in made:
                dtype = _dtype(kind, slot, inputs, complete)
                made[slot] = self.temporary(dtype, stop_gradient=stop_gradient)
        append_operator(self.block, type, inputs, attrs, made)
        return tuple(made[slot] for slot in kind.outputs)

    def parameter(
        self, given: Any, shape: Sequence[int], dtype: str, *, is_bias: bool = False, default: Any = None
    ) -> ProgramVariable:
        """Create a parameter, and append its initialization to the startup program.

        Parameters
        ----------
        given : ParamAttr, str, initializer or None
            The layer's argument; not False.
        shape : sequence of int
        dtype : str
        is_bias : bool
            Whether the default name ends with ``.b`` and the default value is 0.
        default : Initializer, optional
            The initializer, unless `given` has one.

        Raises
        ------
        TranspileError
            A parameter of this name has another shape.
        """
        attr = param_attr(given)
        assert attr is not None  # noqa: S101 - callers leave out parameters that are False
        name = attr.name or unique_name.generate(f"{self.name}.{'b' if is_bias else 'w'}")
        chosen = attr.initializer or default or (default_bias() if is_bias else default_weight())
        block = self.main.global_block()
        known = block.vars.get(name)
        if known is not None and known.shape != tuple(shape):
            raise TranspileError(
                f"parameter {name} has the shape {list(known.shape)}, but another layer needs a parameter of "
                f"the same name with the shape {list(shape)}; give one of them another ParamAttr name"
            )
        facts = {
            "persistable": True,
            "is_parameter": True,
            "trainable": attr.trainable,
            "learning_rate": float(np.float32(attr.learning_rate)),
        }
        # As in Paddle, the first layer with this name determines the initial value, and the last one all
        # other facts.
        first = start_with(self.startup, name, shape, dtype, chosen, **facts)
        parameter = create_variable(block, name, shape, dtype, **facts)
        for each in (first, parameter):
            each.regularizer, each.initializer = attr.regularizer, chosen
        return parameter

    def with_bias(self, x: ProgramVariable, given: Any, *, axis: int = 1) -> ProgramVariable:
        """Add a bias with the shape of `x` from dimension `axis` on, unless `given` is False."""
        if given is False:
            return x
        bias = self.parameter(given, x.shape[axis:], x.dtype, is_bias=True)
        return self.append("elementwise_add", {"X": x, "Y": bias}, axis=axis)

    def activated(self, x: ProgramVariable, act: str | None) -> ProgramVariable:
        """Append an activation, such as ``relu``; return `x` unchanged if `act` is None."""
        return x if act is None else self.append(act, {"X": x})


def start_with(
    startup: Program, name: str, shape: Sequence[int], dtype: str, initializer: Any, **facts: Any
) -> ProgramVariable:
    """Insert an operator at the beginning of a startup program to initialize a variable.

    A variable has only one such operator, from the first call.
    """
    block = startup.global_block()
    created = create_variable(block, name, shape, dtype, **{"persistable": True, **facts})
    if not any(name in op.output_arg_names for op in block.ops):
        type, attrs = initializer.operator(tuple(shape), dtype, startup.random_seed)  # noqa: A001 - as in `Operator`
        # At the front: Paddle's startup programs are in reverse order of creation.
        append_operator(block, type, {}, attrs, {"Out": created}, index=0)
    return created


def buildable(program: Program) -> Program:
    """Return a program to which layers can be appended; reject a program captured from PyTorch."""
    if program.plan is not None and program.training is None:
        raise TranspileError(
            "the default program was captured from a PyTorch model, so layers cannot be appended to it; "
            "build the layers within fluid.program_guard(fluid.Program(), fluid.Program())"
        )
    return program


def _dtype(kind: Kind, slot: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
    """Return the dtype of an operator's output."""
    rule = kind.dtypes.get(slot)
    if rule is None:
        first = inputs[kind.inputs[0]]
        return str((first if isinstance(first, Variable) else first[0]).dtype)
    kind_of_rule, _, name = rule.partition(":")
    if kind_of_rule == "attribute":
        return str(attrs[name])
    return str(inputs[name].dtype) if kind_of_rule == "slot" else rule


def _temporary(like: ProgramVariable, dtype: str, *, stop_gradient: bool = False) -> ProgramVariable:
    return create_variable(
        _current(like), unique_name.generate("tmp"), (), dtype, stop_gradient=stop_gradient
    )


def _current(like: ProgramVariable) -> Block:
    return like.block.program.current_block()


def _scale(x: ProgramVariable, scale: float, bias: float) -> ProgramVariable:
    out = _temporary(x, x.dtype)
    append_operator(_current(x), "scale", {"X": x}, {"scale": scale, "bias": bias}, {"Out": out})
    return out


def _scaled(x: ProgramVariable, scale: float, bias: Any, sign: float = 1.0) -> ProgramVariable | None:
    """Return ``scale * x + sign * bias``, computed by one operator; None unless the bias is a number."""
    return _scale(x, scale, sign * float(bias)) if isinstance(bias, int | float) else None


def _constant(like: ProgramVariable, value: float, *, whole: bool) -> ProgramVariable:
    """Return a constant with one element or, if `whole` is True, with another variable's shape."""
    out = _temporary(like, like.dtype, stop_gradient=True)
    attrs: dict[str, Any] = {"dtype": like.dtype, "value": float(value), "shape": [1]}
    if whole and -1 in like.shape:
        at = like.shape.index(-1)
        attrs |= {"shape": list(like.shape), "input_dim_idx": at, "output_dim_idx": at}
        append_operator(_current(like), "fill_constant_batch_size_like", {"Input": like}, attrs, {"Out": out})
        return out
    if whole:
        attrs["shape"] = list(like.shape)
    append_operator(_current(like), "fill_constant", {}, attrs, {"Out": out})
    return out


def _binary(
    type: str,  # noqa: A002 - as in `Operator`
    x: ProgramVariable,
    other: Any,
    *,
    reverse: bool = False,
    dtype: str | None = None,
) -> ProgramVariable:
    y = other if isinstance(other, ProgramVariable) else _constant(x, other, whole=reverse)
    if y.dtype != x.dtype:
        y = y.astype(x.dtype)
    first, second = (y, x) if reverse else (x, y)
    out = _temporary(x, dtype or x.dtype)
    # Paddle's rule for arithmetic on variables.
    axis = 0 if second.shape and second.shape[0] == -1 else -1
    append_operator(_current(x), type, {"X": first, "Y": second}, {"axis": axis}, {"Out": out})
    return out
