"""The computation of a built program: its forward operators bound to PyTorch functions.

A program is bound once and run in each step. The operators of the backward pass and of the updates are not
bound: autograd computes the gradients, and a class of `fleet.optim` computes the updates.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.fluid.backward import loss_of
from fleet.fluid.ir import Block, Operator, OpRole, ProgramData, Variable
from fleet.fluid.operators import GRAD, Kind, kind_of

__all__ = ["Computation", "Lengths"]

Lengths = Mapping[str, Sequence[Tensor]]
"""The sequence lengths of fed data, by the name of the variable, as one tensor per LoD level."""
Values = MutableMapping[str, Any]
Step = Callable[[Values], None]

_COMPUTED: Final = frozenset(
    (
        int(OpRole.FORWARD),
        int(OpRole.LOSS),
        int(OpRole.SCHEDULE),
        int(OpRole.RPC),
        int(OpRole.DIST),
    )
)
_ELSEWHERE: Final = frozenset({"feed", "fetch", "read", "create_py_reader", "create_double_buffer_reader"})
"""Operators for input and output, which the executor handles itself."""
_LENGTHS: Final = "@LENGTHS@"


class Computation:
    """The forward operators of a program, bound to PyTorch functions.

    Parameters
    ----------
    program : ProgramData
    look_ups : mapping of table name to callable, optional
        Functions that return the rows of ids in tables on parameter servers; see `fleet.fluid.module`.

    Attributes
    ----------
    loss : str or None
        The variable whose gradients the program computes.
    feeds : tuple of str
        The data that the operators read, in order of creation.
    reads : tuple of str
        The persistable variables that the operators read before they write them.
    writes : tuple of str
        The persistable variables that the operators write.
    reshaped : frozenset of str
        The feeds that the operators also write. Their declared shapes are those after the operators have run.

    Raises
    ------
    TranspileError
        An operator cannot be computed.
    """

    def __init__(
        self,
        program: ProgramData,
        look_ups: Mapping[str, Callable[..., Tensor]] | None = None,
    ) -> None:
        self._program = program
        self._look_ups = look_ups or {}
        block = program.global_block()
        self.loss = loss_of(block)
        self._sources: dict[str, tuple[str, int] | None] = {}
        operators = [op for op in block.ops if _is_computed(op)]
        persistable = {name for name, each in block.vars.items() if each.persistable}
        read = _first_read(operators, block)
        self.feeds = tuple(name for name, each in block.vars.items() if each.is_data and name in read)
        tables = set(self._look_ups)
        self.reads = tuple(name for name in block.vars if name in persistable & read - tables)
        written = {name for op in operators for name in op.output_arg_names}
        self.writes = tuple(name for name in block.vars if name in persistable and name in written)
        self.reshaped = frozenset(name for name in self.feeds if name in written)
        self._starts = tuple(
            name
            for name in self.feeds
            if self.loss is not None and not block.vars[name].stop_gradient and _is_float(block.vars[name])
        )
        for name, each in block.vars.items():
            if each.is_data and each.lod_level:
                self._sources[name] = (name, 0)
        self._steps = [self._bound(op, block) for op in operators]
        self._fused, self._hidden = _with_biases(operators, self._steps, block)

    @property
    def program(self) -> ProgramData:
        """The program whose operators this computation runs."""
        return self._program

    def run(
        self,
        values: Mapping[str, Tensor],
        feed: Mapping[str, Tensor],
        lengths: Lengths,
        retained: Collection[str] = (),
        fetched: Collection[str] = (),
    ) -> dict[str, Any]:
        """Run the operators, and return the computed variables.

        Parameters
        ----------
        values : mapping of str to Tensor
            The persistable variables that are read.
        feed : mapping of str to Tensor
        lengths : Lengths
        retained : collection of str
            The variables whose gradients must be available after the backward pass.
        fetched : collection of str
            The variables whose values are needed. A product that is fused with the addition of its bias has
            no value unless it is listed here or in `retained`.

        Returns
        -------
        dict of str to Tensor
            The last value of each variable and, under the name of each retained gradient, the tensor whose
            ``grad`` it is.
        """
        found: dict[str, Any] = {**values, **feed, _LENGTHS: lengths}
        # Detached, so that the script's own tensor does not begin to require gradients.
        starts = {name: found[name].detach().requires_grad_() for name in self._starts if name in retained}
        found |= starts
        hidden = self._hidden
        whole = hidden and not (hidden.isdisjoint(retained) and hidden.isdisjoint(fetched))
        for step in self._steps if whole else self._fused:
            step(found)
        del found[_LENGTHS]
        for name in retained:
            tensor = starts.get(name, found.get(name))
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.retain_grad()
                found[name + GRAD] = tensor
        return found

    def source_of(self, name: str) -> tuple[str, int] | None:
        """Return the fed data whose sequences a variable inherits, and the number of LoD levels removed."""
        return self._sources.get(name)

    def _bound(self, op: Operator, block: Block) -> Step:
        if op.type == "conditional_block":
            return self._conditional(op)
        kind = kind_of(op.type)
        lengths = self._trace(op, kind)
        compute = self._function(op, kind, lengths)
        arguments = [_held(op.inputs, kind, slot) for slot in kind.inputs]
        if op.type == "lookup_table" and op.inputs["W"][0] in self._look_ups:
            arguments = arguments[:1]  # the table's rows are on servers
        outputs = [_held(op.outputs, kind, slot) for slot in kind.outputs]
        ended = frozenset(name for name in op.output_arg_names if block.var(name).stop_gradient)
        # Most operators have one or two inputs and one output. For these, `_step_1` and `_step_2` take half
        # the time of `_step`, in every operator of every step.
        if len(outputs) == 1 and isinstance(outputs[0], str) and not ended and lengths is None:
            if len(arguments) == 1 and isinstance(arguments[0], str):
                return partial(_step_1, compute, arguments[0], outputs[0])
            named = [each for each in arguments if isinstance(each, str)]
            if len(named) == len(arguments) == 2:
                return partial(_step_2, compute, named[0], named[1], outputs[0])
        return partial(_step, compute, arguments, outputs, ended, lengths)

    def _function(self, op: Operator, kind: Kind, lengths: Any) -> Callable[..., Any]:
        if op.type == "lookup_table" and op.inputs["W"][0] in self._look_ups:
            return partial(self._look_ups[op.inputs["W"][0]], padding_idx=op.attrs["padding_idx"])
        attrs = {name: op.attrs.get(name, kind.attrs.get(name)) for name in kind.takes if name in kind.attrs}
        if "attributes" in kind.takes:
            attrs = {"attributes": dict(op.attrs)}
        if "lengths" in kind.takes and lengths is None and op.type == "sequence_pool":
            raise ConfigurationError(
                f"operator {op.type} reads {op.input_arg_names[0]}, whose rows do not form sequences; "
                "expected data with a lod_level, and only layers in between that keep its sequences"
            )
        return partial(kind.compute, **attrs) if attrs else kind.compute

    def _trace(self, op: Operator, kind: Kind) -> tuple[str, int] | None:
        """Record whose sequences the outputs inherit; return the input's source if lengths are needed."""
        of = op.inputs.get(kind.lod_slot({**kind.attrs, **op.attrs}))
        kept = source = self._sources.get(of[0]) if of else None
        if source is not None:
            data, lost = source[0], source[1] + int(kind.drops_level)
            kept = (data, lost) if lost < self._program.global_block().var(data).lod_level else None
        for slot, names in op.outputs.items():
            for name in names:
                self._sources[name] = kept if slot in kind.shares and not kind.forgets else None
        if "lengths" not in kind.takes:
            return None
        return self._sources.get(op.inputs[kind.inputs[0]][0]) if source is None else source

    def _conditional(self, op: Operator) -> Step:
        """Bind the operators of a conditional block to PyTorch functions."""
        number: Any = op.attrs["sub_block"]
        block = self._program.blocks[number["block"] if isinstance(number, dict) else number]
        steps = [self._bound(each, block) for each in block.ops]
        (condition,) = op.inputs["Cond"]

        def step(values: Values) -> None:
            if bool(values[condition]):
                for each in steps:
                    each(values)

        return step


def _with_biases(
    operators: Sequence[Operator], steps: Sequence[Step], block: Block
) -> tuple[list[Step], frozenset[str]]:
    """Fuse matrix products with bias additions; return the steps, and the names of the fused products."""
    readers = Counter(name for op in operators for name in op.input_arg_names)
    fused: list[Step] = []
    hidden: set[str] = set()
    for op, following, step in zip_longest(operators, operators[1:], steps):
        if hidden.intersection(op.input_arg_names):
            continue  # it was computed with the product
        if op.type == "mul" and following is not None and following.type == "elementwise_add":
            (x,), (y,), (out,) = op.inputs["X"], op.inputs["Y"], op.outputs["Out"]
            (bias,), (total,) = following.inputs["Y"], following.outputs["Out"]
            ranks = [len(block.var(name).shape) for name in (x, y, bias)]
            ends = block.var(out).stop_gradient or block.var(total).stop_gradient
            if ranks == [2, 2, 1] and following.inputs["X"] == (out,) and readers[out] == 1 and not ends:
                fused.append(partial(_product_step, x, y, bias, total))
                hidden.add(out)
                continue
        fused.append(step)
    return fused, frozenset(hidden)


def _product_step(x: str, y: str, bias: str, out: str, values: Values) -> None:
    values[out] = torch.addmm(values[bias], values[x], values[y])


def _is_computed(op: Operator) -> bool:
    return op.attrs.get("op_role", 0) in _COMPUTED and op.type not in _ELSEWHERE


def _is_float(variable: Variable) -> bool:
    return variable.dtype.startswith("float")


def _first_read(operators: Sequence[Operator], block: Block) -> set[str]:
    """Return the variables that operators read before writing them."""
    read: set[str] = set()
    written: set[str] = set()
    for op in operators:
        inner = _inner(op, block)
        for each in (op, *inner):
            read.update(name for name in each.input_arg_names if name not in written)
            written.update(each.output_arg_names if not inner else ())
        if inner:  # it may not run
            read.update(name for name in op.outputs.get("Out", ()) if name not in written)
    return read


def _inner(op: Operator, block: Block) -> Sequence[Operator]:
    number: Any = op.attrs.get("sub_block")
    if op.type != "conditional_block":
        return ()
    return block.program.blocks[number["block"] if isinstance(number, dict) else number].ops


def _held(slots: Mapping[str, tuple[str, ...]], kind: Kind, slot: str) -> str | tuple[str, ...] | None:
    names = slots.get(slot, ())
    if slot in kind.several:
        return names
    return names[0] if names else None


def _step_1(compute: Callable[..., Any], x: str, out: str, values: Values) -> None:
    values[out] = compute(values[x])


def _step_2(compute: Callable[..., Any], x: str, y: str, out: str, values: Values) -> None:
    values[out] = compute(values[x], values[y])


def _step(
    compute: Callable[..., Any],
    arguments: Sequence[str | tuple[str, ...] | None],
    outputs: Sequence[str | tuple[str, ...] | None],
    ended: frozenset[str],
    lengths: tuple[str, int] | None,
    values: Values,
) -> None:
    given = [
        None if each is None else values[each] if isinstance(each, str) else [values[name] for name in each]
        for each in arguments
    ]
    if lengths is None:
        found = compute(*given)
    else:
        data, lost = lengths
        levels = values[_LENGTHS][data]
        found = compute(*given, lengths=levels[len(levels) - lost - 1])
    results = found if isinstance(found, tuple) else (found,)
    for name, result in zip(outputs, results, strict=True):
        if isinstance(name, tuple):
            values.update(zip(name, result, strict=True))
        elif name is not None and result is not None:
            values[name] = result.detach() if name in ended and isinstance(result, Tensor) else result
