"""The kinds of operators in built programs: slots, attributes, shape inference, computation and gradient.

A kind is registered by the decorator `kind` on the function that computes it::

    @kind("scale", "X", "Out", grad=Gradient(...), scale=1.0, bias=0.0, bias_after_scale=True)
    def _scale(x, scale, bias, bias_after_scale): ...

The function takes a tensor for each input slot, in the order of the slots: a list for a slot with the suffix
``*``, and None for a missing slot with the suffix ``?``. After the slots, it takes the attributes that its
signature names. It returns a tensor for each output slot, as a tuple if there are several. A parameter
``lengths`` receives the lengths of the sequences in the first input, and ``attributes`` receives all
attributes.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fleet.errors import TranspileError
from fleet.fluid.ir import Attribute

__all__ = ["GRAD", "Gradient", "Kind", "Shape", "kind", "kind_of", "kinds"]

Shape = tuple[int, ...]
GRAD: Final = "@GRAD"
Shapes = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Shape]]


@dataclass(frozen=True)
class Gradient:
    """A description of the operator that computes the gradients of another operator's inputs.

    Attributes
    ----------
    of : tuple of str
        The input slots that have gradients.
    reads : tuple of str or callable
        The gradient operator's input slots: inputs, outputs, and outputs with ``@GRAD``. A callable returns
        them for the attributes.
    type : str
        The gradient operator's type; empty for the operator's type with ``_grad``.
    attrs : callable, optional
        Returns the gradient operator's attributes, given those of the operator; by default they are the same.
    lod_from : str
        The variable whose LoD levels the gradient has: ``X`` (the input itself), ``Out`` (the gradient of the
        output), or none.
    slots : mapping of str to str
        New names for the slots whose names do not follow the rules.
    """

    of: tuple[str, ...]
    reads: tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
    type: str = ""
    attrs: Callable[[Mapping[str, Attribute]], dict[str, Attribute]] | None = None
    lod_from: str = "X"
    slots: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of operator: its slots, attributes, computation and gradient.

    Attributes
    ----------
    type : str
    inputs, outputs : tuple of str
        The slots, in the order of the function's arguments and results; outputs are created in this order.
    several, optional : frozenset of str
        The slots that hold several variables, and the input slots that may be missing.
    attrs : mapping of attribute name to default
    compute : callable
    shapes : callable
        Takes the shapes of the inputs by slot and the attributes; returns the shape of each output. By
        default the first output has the shape of the first input.
    dtypes : mapping of output slot to dtype
        A dtype, ``attribute:NAME``, or ``slot:NAME`` for the dtype of an input; by default the dtype of the
        first input.
    gradient : Gradient or None
        None if the operator passes no gradient.
    lod : str or callable
        The input slot whose sequences are also those of outputs; empty if there is none. A callable returns
        it for the attributes.
    shares : tuple of str
        The outputs that have the sequences of that input.
    drops_level : bool
        Whether these outputs have one level of lengths fewer than the input.
    forgets : bool
        Whether the rows of outputs form no sequences although their variables have levels, as in Paddle.
    takes : tuple of str
        The attributes, and ``lengths`` and ``attributes``, that the function takes.
    """

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    several: frozenset[str]
    optional: frozenset[str]
    attrs: Mapping[str, Attribute]
    compute: Callable[..., Any]
    shapes: Shapes
    dtypes: Mapping[str, str]
    gradient: Gradient | None
    lod: str | Callable[[Mapping[str, Any]], str]
    shares: tuple[str, ...]
    drops_level: bool
    forgets: bool
    takes: tuple[str, ...]

    def lod_slot(self, attrs: Mapping[str, Any]) -> str:
        """Return the input slot whose sequences the outputs inherit; empty if there is none."""
        return self.lod(attrs) if callable(self.lod) else self.lod


_kinds: dict[str, Kind] = {}


def kind_of(type: str) -> Kind:  # noqa: A002 - as in `Operator`
    """Return the kind of operator with the given type.

    Raises
    ------
    TranspileError
        No such kind is registered.
    """
    if type not in _kinds:
        raise TranspileError(
            f"operator {type} cannot be computed: fleet.fluid has no such operator; build the program with "
            "fluid.layers, and see docs/paddle.md for the layers that there are"
        )
    return _kinds[type]


def kinds() -> Mapping[str, Kind]:
    """Return all kinds of operators, by type."""
    return _kinds


def kind(
    type: str,  # noqa: A002 - as in `Operator`
    inputs: str,
    outputs: str,
    *,
    shapes: Shapes | None = None,
    dtypes: Mapping[str, str] | None = None,
    grad: Gradient | None = None,
    lod: str | Callable[[Mapping[str, Any]], str] | None = None,
    shares: Sequence[str] = (),
    drops_level: bool = False,
    forgets: bool = False,
    **attrs: Attribute,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the computation of a kind of operator."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        marked = inputs.split()
        slots, results = (tuple(slot.rstrip("*?") for slot in each.split()) for each in (inputs, outputs))
        several = (slot for slot in (*marked, *outputs.split()) if slot.endswith("*"))
        first = slots[0] if slots else ""
        names = list(inspect.signature(compute).parameters)[len(slots) :]
        _kinds[type] = Kind(
            type,
            slots,
            results,
            frozenset(slot.rstrip("*") for slot in several),
            frozenset(slot.rstrip("*?") for slot in marked if slot.endswith("?")),
            attrs,
            compute,
            shapes or (lambda given, _: (given[first],)),
            dtypes or {},
            grad,
            first if lod is None else lod,
            tuple(shares) or results[:1],
            drops_level,
            forgets,
            tuple(names),
        )
        return compute

    return register
