"""Gradient clipping before regularization, as operators of a program and as part of a plan.

The plan determines how gradients are clipped: by PyTorch in one process, and by the servers of a job with
servers (see `fleet.plan.clipping`). Like ``torch.nn.utils.clip_grad_norm_``, both add 1e-6 to norms.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fleet.errors import ConfigurationError
from fleet.fluid import unique_name
from fleet.fluid.building import Layer, ProgramVariable, append_operator, create_variable
from fleet.fluid.ir import Attribute, OpRole, Variable
from fleet.fluid.names import missing
from fleet.fluid.program import Program, default_main_program
from fleet.plan.clipping import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradClip

__all__ = [
    "GradientClipByGlobalNorm",
    "GradientClipByNorm",
    "GradientClipByValue",
    "set_gradient_clip",
]

Pairs = list[tuple[ProgramVariable, ProgramVariable]]
_OPTIMIZE = int(OpRole.OPTIMIZE)


class GradientClip(ABC):
    """The base class of gradient clipping methods.

    Attributes
    ----------
    plan : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm
        The same clipping in a plan.
    """

    plan: GradClip

    def __init__(self, need_clip: Callable[[Any], bool] | None) -> None:
        if need_clip is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: need_clip is {need_clip!r}, but servers clip all gradients or none; "
                "leave it at None"
            )

    @abstractmethod
    def append(self, params_grads: Pairs, *, as_attribute: bool = False) -> Pairs:
        """Append the clipping operators, and return the parameters with the clipped gradients.

        Parameters
        ----------
        params_grads : list of (ProgramVariable, ProgramVariable)
            The parameters and their gradients, by name.
        as_attribute : bool
            Whether the clipping comes from `set_gradient_clip`; Paddle's operators then have another order.

        Returns
        -------
        list of (ProgramVariable, ProgramVariable)
            The parameters and their clipped gradients.
        """


class GradientClipByValue(GradientClip):
    """Limits each gradient element to a range: Paddle's ``fluid.clip.GradientClipByValue``.

    Parameters
    ----------
    max : float
    min : float, optional
        By default ``-max``.
    need_clip : callable, optional
        Not supported.

    Raises
    ------
    ConfigurationError
        A bound is not finite, or `min` is larger than `max`.
    """

    def __init__(
        self,
        max: float,  # noqa: A002 - Paddle's name
        min: float | None = None,  # noqa: A002 - Paddle's name
        need_clip: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(need_clip)
        self.plan: GradClip = ClipGradByValue(max, min)

    def append(self, params_grads: Pairs, *, as_attribute: bool = False) -> Pairs:
        """Append operators that clip each gradient by value."""
        assert isinstance(self.plan, ClipGradByValue)  # noqa: S101 - for mypy
        bounds: dict[str, Any] = {"min": float(self.plan.low), "max": float(self.plan.max)}
        return _each(params_grads, "clip", end=0 if as_attribute else None, **bounds)


class GradientClipByNorm(GradientClip):
    """Scales down each gradient to a maximum norm: Paddle's ``fluid.clip.GradientClipByNorm``.

    Parameters
    ----------
    clip_norm : float
    need_clip : callable, optional
        Not supported.

    Raises
    ------
    ConfigurationError
        The norm is not positive.
    """

    def __init__(self, clip_norm: float, need_clip: Callable[[Any], bool] | None = None) -> None:
        super().__init__(need_clip)
        self.plan: GradClip = ClipGradByNorm(clip_norm)
        self.clip_norm = float(clip_norm)

    def append(self, params_grads: Pairs, *, as_attribute: bool = False) -> Pairs:
        """Append operators that clip each gradient by its norm."""
        end = 0 if as_attribute else None
        return _each(params_grads, "clip_by_norm", end=end, max_norm=self.clip_norm)


class GradientClipByGlobalNorm(GradientClip):
    """Scales down all gradients by one factor: Paddle's ``fluid.clip.GradientClipByGlobalNorm``.

    Parameters
    ----------
    clip_norm : float
        The norm of all gradients together.
    group_name : str
        Must be the default: there is one group of all parameters.
    need_clip : callable, optional
        Not supported.

    Raises
    ------
    ConfigurationError
        The norm is not positive, or `group_name` is not the default.
    """

    def __init__(
        self,
        clip_norm: float,
        group_name: str = "default_group",
        need_clip: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(need_clip)
        if group_name != "default_group":
            raise ConfigurationError(
                f"GradientClipByGlobalNorm: group_name is {group_name!r}, and all gradients are one group; "
                "leave it at 'default_group'"
            )
        self.plan: GradClip = ClipGradByGlobalNorm(clip_norm)
        self.clip_norm = float(clip_norm)

    def append(self, params_grads: Pairs, *, as_attribute: bool = False) -> Pairs:
        """Append the operators that scale down all gradients to a maximum global norm."""
        program = params_grads[0][0].block.program
        begin = len(program.global_block().ops)
        squares: list[ProgramVariable] = []
        limit = None
        for parameter, gradient in params_grads:
            with program.roles(_OPTIMIZE, (parameter.name, gradient.name)):
                if as_attribute and limit is None:
                    limit = self._limit(gradient)
                merged = gradient
                if gradient.type == "SELECTED_ROWS":
                    merged = _append("merge_selected_rows", {"X": gradient}, gradient)
                    merged = _append("get_tensor_from_selected_rows", {"X": merged}, merged, "LOD_TENSOR")
                square = _append("square", {"X": merged}, merged)
                squares.append(_append("reduce_sum", {"X": square}, square, reduce_all=True))
        end = len(program.global_block().ops) if as_attribute else None
        parameter, gradient = params_grads[0 if as_attribute else -1]
        with program.roles(_OPTIMIZE, (parameter.name, gradient.name)):
            norm = _append("sqrt", {"X": _append("sum", {"X": squares}, squares[0])}, squares[0])
            limit = limit or self._limit(norm)
            largest = _append("elementwise_max", {"X": limit, "Y": norm}, norm)
            factor = _append("elementwise_div", {"X": limit, "Y": largest}, norm)
        return _each(params_grads, "elementwise_mul", {"Y": factor}, begin, end)

    def _limit(self, like: ProgramVariable) -> ProgramVariable:
        attrs = {"value": self.clip_norm, "shape": [1], "dtype": like.dtype, "str_value": str(self.clip_norm)}
        made = _append("fill_constant", {}, like, "LOD_TENSOR", **attrs)
        made.stop()
        return made


def set_gradient_clip(
    clip: GradientClip, param_list: Iterable[str | Variable] | None = None, program: Program | None = None
) -> None:
    """Set the gradient clipping of a program; an optimizer's own `grad_clip` takes precedence.

    Parameters
    ----------
    clip : GradientClipByValue, GradientClipByNorm or GradientClipByGlobalNorm
    param_list : iterable of Variable or str, optional
        Not supported: all gradients are clipped.
    program : Program, optional
        By default the default main program.

    Raises
    ------
    ConfigurationError
        `clip` is not of one of these classes, `param_list` is given, or the program has no parameters yet.

    Notes
    -----
    Paddle's ``fluid.clip.set_gradient_clip``. Call it before ``minimize``.
    """
    if not isinstance(clip, GradientClip):
        raise ConfigurationError(
            f"set_gradient_clip: clip is {clip!r}; expected fluid.clip.GradientClipByValue(max), "
            "GradientClipByNorm(clip_norm) or GradientClipByGlobalNorm(clip_norm)"
        )
    if param_list is not None:
        raise ConfigurationError(
            "set_gradient_clip: param_list is given, but servers clip all gradients or none; leave it out"
        )
    chosen = program or default_main_program()
    if not chosen.all_parameters():
        raise ConfigurationError(
            "set_gradient_clip: the program has no parameters yet, and the original clips only those that it "
            "has; call it after the layers and before minimize"
        )
    chosen.gradient_clip = clip


def _append(
    type: str,  # noqa: A002 - as in `Operator`
    inputs: dict[str, Any],
    like: ProgramVariable,
    kind: str | None = None,
    **attrs: Any,
) -> ProgramVariable:
    """Append an operator; `kind`, or else `like`, determines whether the output is dense or selected rows."""
    layer = Layer(type)
    name = unique_name.generate(f"{layer.name}.tmp")
    out = create_variable(layer.block, name, (), like.dtype, type=kind or like.type)
    append_operator(layer.block, type, inputs, attrs, {"Out": out})
    return out


def _each(
    params_grads: Pairs,
    type: str,  # noqa: A002 - as in `Operator`
    others: Mapping[str, ProgramVariable] | None = None,
    begin: int | None = None,
    end: int | None = None,
    **attrs: Any,
) -> Pairs:
    """Append one operator per gradient; return the parameters with the new gradients.

    The operators from `begin` to `end` then name the new gradients in ``op_role_var``, as in Paddle.
    """
    block = params_grads[0][0].block.program.global_block()
    begin = len(block.ops) if begin is None else begin
    found = []
    for parameter, gradient in params_grads:
        with block.program.roles(_OPTIMIZE, (parameter.name, gradient.name)):
            found.append((parameter, _append(type, {"X": gradient, **(others or {})}, gradient, **attrs)))
    new = {parameter.name: gradient.name for parameter, gradient in found}
    for at, op in enumerate(block.ops[begin:end], start=begin):
        about: list[Attribute] = [op.attr("op_role_var")[0], new[op.attr("op_role_var")[0]]]
        block.ops[at] = replace(op, attrs={**op.attrs, "op_role_var": about})
    return found


if not TYPE_CHECKING:
    __getattr__ = missing("clip")
