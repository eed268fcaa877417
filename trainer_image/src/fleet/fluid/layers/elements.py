"""Layers that compute element by element, reduce, compare, create or reshape tensors.

A layer appends operators to the default main program, and returns the variables of their results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigurationError
from fleet.fluid.building import Layer, ProgramVariable, create_variable
from fleet.fluid.initializer import NumpyArrayInitializer
from fleet.fluid.program import default_main_program

__all__ = [
    "abs",
    "assign",
    "cast",
    "ceil",
    "clip",
    "concat",
    "cos",
    "cos_sim",
    "create_parameter",
    "create_tensor",
    "data",
    "elementwise_add",
    "elementwise_div",
    "elementwise_max",
    "elementwise_min",
    "elementwise_mul",
    "elementwise_pow",
    "elementwise_sub",
    "equal",
    "exp",
    "expand",
    "fill_constant",
    "fill_constant_batch_size_like",
    "floor",
    "gather",
    "gelu",
    "greater_equal",
    "greater_than",
    "increment",
    "l2_normalize",
    "less_equal",
    "less_than",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "matmul",
    "mean",
    "mul",
    "not_equal",
    "ones",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "relu",
    "reshape",
    "scale",
    "sigmoid",
    "sign",
    "slice",
    "softmax",
    "softsign",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "sum",
    "sums",
    "tanh",
    "transpose",
    "unsqueeze",
    "unstack",
    "zeros",
]

Var = ProgramVariable


def data(
    name: str,
    shape: Sequence[int],
    append_batch_size: bool = True,
    dtype: str = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Var:
    """Declare data to be fed at run time.

    Parameters
    ----------
    name : str
    shape : sequence of int
        Without the batch size, unless a size is -1 or `append_batch_size` is False.
    append_batch_size : bool
        Whether to prepend -1 for the batch size.
    dtype : str
    lod_level : int
        The number of levels of lengths that divide the rows into sequences.
    type : object, optional
        Has no effect.
    stop_gradient : bool
        Whether gradients end here.
    """
    sizes = [-1 if size is None else int(size) for size in shape]
    if append_batch_size and -1 not in sizes:
        sizes = [-1, *sizes]
    block = Layer("data", name).main.global_block()
    return create_variable(
        block, name, sizes, _dtype(dtype), is_data=True, lod_level=lod_level, stop_gradient=stop_gradient
    )


def _dtype(given: Any) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(getattr(given, "__name__", given)).removeprefix("torch.")


def _named(layer: Any, name: str, doc: str) -> Callable[..., Var]:
    layer.__name__ = layer.__qualname__ = name
    layer.__doc__ = doc
    return layer  # type: ignore[no-any-return]


def _unary(type: str) -> Callable[..., Var]:
    def layer(x: Var, name: str | None = None) -> Var:
        return Layer(type, name).append(type, {"X": x})

    return _named(layer, type, f"Compute ``{type}`` element by element.")


abs = _unary("abs")
ceil = _unary("ceil")
cos = _unary("cos")
exp = _unary("exp")
floor = _unary("floor")
log = _unary("log")
relu = _unary("relu")
sigmoid = _unary("sigmoid")
sign = _unary("sign")
softsign = _unary("softsign")
sqrt = _unary("sqrt")
square = _unary("square")
tanh = _unary("tanh")


def gelu(x: Var, approximate: bool = False) -> Var:
    """Apply the Gaussian error linear unit to each element."""
    return Layer("gelu").append("gelu", {"X": x}, approximate=approximate)


def _elementwise(type: str) -> Callable[..., Var]:
    def layer(x: Var, y: Var, axis: int = -1, act: str | None = None, name: str | None = None) -> Var:
        made = Layer(type, name)
        return made.activated(made.append(type, {"X": x, "Y": y}, axis=axis), act)

    doc = f"Compute ``{type}``; `y` has the dimensions of `x` from `axis` on, by default the last ones."
    return _named(layer, type, doc)


elementwise_add = _elementwise("elementwise_add")
elementwise_div = _elementwise("elementwise_div")
elementwise_max = _elementwise("elementwise_max")
elementwise_min = _elementwise("elementwise_min")
elementwise_mul = _elementwise("elementwise_mul")
elementwise_pow = _elementwise("elementwise_pow")
elementwise_sub = _elementwise("elementwise_sub")


def _comparison(type: str) -> Callable[..., Var]:
    def layer(x: Var, y: Var, force_cpu: bool | None = None, cond: Var | None = None) -> Var:
        attrs: dict[str, Any] = {} if force_cpu is None else {"force_cpu": force_cpu}
        return Layer(type).append(type, {"X": x, "Y": y}, outputs={"Out": cond}, stop_gradient=True, **attrs)

    return _named(layer, type, f"Compute ``{type}`` element by element; gradients end here.")


equal = _comparison("equal")
greater_equal = _comparison("greater_equal")
greater_than = _comparison("greater_than")
less_equal = _comparison("less_equal")
less_than = _comparison("less_than")
not_equal = _comparison("not_equal")


def logical_and(x: Var, y: Var, out: Var | None = None, name: str | None = None) -> Var:
    """Return the element-wise ``x and y``."""
    return Layer("logical_and", name).append("logical_and", {"X": x, "Y": y}, outputs={"Out": out})


def logical_or(x: Var, y: Var, out: Var | None = None, name: str | None = None) -> Var:
    """Return the element-wise ``x or y``."""
    return Layer("logical_or", name).append("logical_or", {"X": x, "Y": y}, outputs={"Out": out})


def logical_not(x: Var, out: Var | None = None, name: str | None = None) -> Var:
    """Return the element-wise ``not x``."""
    return Layer("logical_not", name).append("logical_not", {"X": x}, outputs={"Out": out})


def _reduction(type: str) -> Callable[..., Var]:
    def layer(
        input: Var,
        dim: int | Sequence[int] | None = None,
        keep_dim: bool = False,
        name: str | None = None,
    ) -> Var:
        dims = [dim] if isinstance(dim, int) else list(dim or [])
        return Layer(type, name).append(
            type, {"X": input}, dim=dims or [0], keep_dim=keep_dim, reduce_all=not dims
        )

    return _named(layer, type, f"Compute ``{type}`` over some dimensions; over all if `dim` is None.")


reduce_max = _reduction("reduce_max")
reduce_mean = _reduction("reduce_mean")
reduce_min = _reduction("reduce_min")
reduce_sum = _reduction("reduce_sum")


def mean(x: Var, name: str | None = None) -> Var:
    """Return the mean of all elements, with shape ``(1,)``."""
    return Layer("mean", name).append("mean", {"X": x})


def mul(x: Var, y: Var, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Var:
    """Multiply two tensors as matrices, after flattening the leading dimensions of each into rows."""
    attrs: dict[str, Any] = {"x_num_col_dims": x_num_col_dims, "y_num_col_dims": y_num_col_dims}
    return Layer("mul", name).append("mul", {"X": x, "Y": y}, **attrs)


def matmul(
    x: Var,
    y: Var,
    transpose_x: bool = False,
    transpose_y: bool = False,
    alpha: float = 1.0,
    name: str | None = None,
) -> Var:
    """Multiply matrices in the last two dimensions, and scale the product by ``alpha``."""
    attrs: dict[str, Any] = {"transpose_X": transpose_x, "transpose_Y": transpose_y, "alpha": float(alpha)}
    return Layer("matmul", name).append("matmul", {"X": x, "Y": y}, **attrs)


def softmax(
    input: Var,
    use_cudnn: bool = False,
    name: str | None = None,
    axis: int = -1,
) -> Var:
    """Apply the softmax along a dimension."""
    return Layer("softmax", name).append("softmax", {"X": input}, axis=axis)


def l2_normalize(x: Var, axis: int, epsilon: float = 1e-12, name: str | None = None) -> Var:
    """Divide a tensor by its L2 norm along a dimension."""
    axis = 0 if len(x.shape) == 1 else axis
    out: Var = Layer("l2_normalize", name).append("norm", {"X": x}, axis=axis, epsilon=epsilon)
    return out


def cos_sim(X: Var, Y: Var) -> Var:
    """Compute the cosine similarity of the rows of two matrices."""
    return Layer("cos_sim").append("cos_sim", {"X": X, "Y": Y})


def scale(
    x: Var,
    scale: float = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Var:
    """Return ``scale * x + bias``; without `bias_after_scale`, return ``scale * (x + bias)``."""
    layer = Layer("scale", name)
    attrs: dict[str, Any] = {"scale": float(scale), "bias": float(bias), "bias_after_scale": bias_after_scale}
    return layer.activated(layer.append("scale", {"X": x}, **attrs), act)


def clip(x: Var, min: float, max: float, name: str | None = None) -> Var:
    """Clip each element to a range; as in Paddle, `name` is the name of the result itself."""
    attrs: dict[str, Any] = {"min": float(min), "max": float(max)}
    layer = Layer("clip", name)
    out = layer.temporary(x.dtype) if name is None else create_variable(layer.block, name, (), x.dtype)
    return layer.append("clip", {"X": x}, outputs={"Out": out}, **attrs)


def cast(x: Var, dtype: Any) -> Var:
    """Convert a tensor to another dtype; conversion to integers truncates."""
    attrs: dict[str, Any] = {"in_dtype": x.dtype, "out_dtype": _dtype(dtype)}
    return Layer("cast").append("cast", {"X": x}, **attrs)


def concat(input: Sequence[Var] | Var, axis: int = 0, name: str | None = None) -> Var:
    """Concatenate tensors along a dimension."""
    inputs = [input] if isinstance(input, Var) else list(input)
    return Layer("concat", name).append("concat", {"X": inputs}, axis=axis)


def sums(input: Sequence[Var] | Var, out: Var | None = None) -> Var:
    """Return the sum of several tensors."""
    inputs = [input] if isinstance(input, Var) else list(input)
    return Layer("sum").append("sum", {"X": inputs}, outputs={"Out": out})


def sum(x: Sequence[Var] | Var) -> Var:
    """Return the sum of several tensors."""
    return sums(x)


def reshape(
    x: Var,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Var:
    """Change a tensor's shape; a size of 0 keeps the dimension, and a size of -1 is inferred."""
    if actual_shape is not None or not all(isinstance(size, int) for size in shape):
        raise ConfigurationError(
            "layers.reshape: shape contains a variable; expected whole numbers, at most one of them -1"
        )
    layer = Layer("reshape2", name)
    out = layer.append("reshape2", {"X": x}, outputs={"Out": x if inplace else None}, shape=list(shape))
    return layer.activated(out, act)


def squeeze(input: Var, axes: Sequence[int], name: str | None = None) -> Var:
    """Remove dimensions of size 1 from a tensor."""
    return Layer("squeeze", name).append("squeeze2", {"X": input}, axes=list(axes))


def unsqueeze(input: Var, axes: int | Sequence[int], name: str | None = None) -> Var:
    """Insert dimensions of size 1 into a tensor."""
    chosen = [axes] if isinstance(axes, int) else list(axes)
    return Layer("unsqueeze2", name).append("unsqueeze2", {"X": input}, axes=chosen)


def transpose(x: Var, perm: Sequence[int], name: str | None = None) -> Var:
    """Permute the dimensions of a tensor."""
    return Layer("transpose", name).append("transpose2", {"X": x}, axis=list(perm))


def gather(input: Var, index: Var, overwrite: bool = True) -> Var:
    """Select rows of a tensor by index."""
    inputs = {"X": input, "Index": index}
    return Layer("gather").append("gather", inputs, overwrite=overwrite)


def slice(input: Var, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Var:
    """Select a range along each of several dimensions."""
    attrs: dict[str, Any] = {
        "axes": list(axes),
        "starts": list(starts),
        "ends": list(ends),
        "infer_flags": [1] * len(axes),
    }
    return Layer("slice").append("slice", {"Input": input}, **attrs)


def stack(x: Sequence[Var] | Var, axis: int = 0) -> Var:
    """Stack tensors along a new dimension."""
    xs = [x] if isinstance(x, Var) else list(x)
    return Layer("stack").append("stack", {"X": xs}, axis=axis)


def unstack(x: Var, axis: int = 0, num: int | None = None) -> list[Var]:
    """Split a tensor along a dimension into tensors without that dimension."""
    layer, count = Layer("unstack"), x.shape[axis] if num is None else num
    outputs = [layer.temporary(x.dtype) for _ in range(count)]
    layer.append_all("unstack", {"X": x}, outputs={"Y": outputs}, axis=axis, num=count)
    return outputs


def expand(x: Var, expand_times: Sequence[int], name: str | None = None) -> Var:
    """Repeat a tensor along each dimension a given number of times."""
    return Layer("expand", name).append("expand", {"X": x}, expand_times=list(expand_times))


def increment(x: Var, value: float = 1.0, in_place: bool = True) -> Var:
    """Increase a one-element tensor by a number."""
    outputs = {"Out": x if in_place else None}
    return Layer("increment").append("increment", {"X": x}, outputs=outputs, step=float(value))


def assign(input: Var | NDArray[Any], output: Var | None = None) -> Var:
    """Copy a variable or an array of bool, float32, int32 or int64, by default to a new variable."""
    if isinstance(input, np.ndarray) and input.dtype.name in ("bool", "float32", "int32", "int64"):
        values: dict[str, Any] = NumpyArrayInitializer(input).operator(input.shape, input.dtype.name)[1]
        return Layer("assign").append("assign_value", {}, outputs={"Out": output}, **values)
    if not isinstance(input, Var):
        raise ConfigurationError(
            f"layers.assign: input is {input!r}; expected a variable, such as layers.fill_constant returns, "
            "or a numpy.ndarray of bool, float32, int32 or int64"
        )
    return Layer("assign").append("assign", {"X": input}, outputs={"Out": output})


def fill_constant(
    shape: Sequence[int],
    dtype: Any,
    value: float,
    force_cpu: bool = False,
    out: Var | None = None,
    name: str | None = None,
) -> Var:
    """Create a constant tensor, through which no gradients flow."""
    attrs: dict[str, Any] = {
        "shape": [int(size) for size in shape],
        "dtype": _dtype(dtype),
        "value": float(value),
    }
    attrs |= {"str_value": _text(value, attrs["dtype"]), "force_cpu": force_cpu}
    made: Var = Layer("fill_constant", name).append(
        "fill_constant", {}, outputs={"Out": out}, stop_gradient=True, **attrs
    )
    made.stop()
    return made


def _text(value: float, dtype: str) -> str:
    return str(int(value)) if "int" in dtype else str(float(value))


def fill_constant_batch_size_like(
    input: Var,
    shape: Sequence[int],
    dtype: Any,
    value: float,
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    force_cpu: bool = False,
) -> Var:
    """Create a constant tensor with the batch size of another; no gradients flow through it."""
    attrs: dict[str, Any] = {"shape": list(shape), "dtype": _dtype(dtype), "value": float(value)}
    attrs |= {"str_value": _text(value, attrs["dtype"]), "force_cpu": force_cpu}
    attrs |= {"input_dim_idx": input_dim_idx, "output_dim_idx": output_dim_idx}
    layer = Layer("fill_constant_batch_size_like")
    return layer.append("fill_constant_batch_size_like", {"Input": input}, stop_gradient=True, **attrs)


def ones(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Var:
    """Create a tensor of ones."""
    return fill_constant(shape, dtype, 1.0, force_cpu)


def zeros(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Var:
    """Create a tensor of zeros."""
    return fill_constant(shape, dtype, 0.0, force_cpu)


def create_tensor(dtype: Any, name: str | None = None, persistable: bool = False) -> Var:
    """Declare a variable without a value, as the target of assignments."""
    layer = Layer("create_tensor", name)
    return create_variable(
        default_main_program().global_block(), layer.name, (), _dtype(dtype), persistable=persistable
    )


def create_parameter(
    shape: Sequence[int],
    dtype: Any,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Any = None,
) -> Var:
    """Create a parameter outside any layer."""
    layer = Layer("create_parameter")
    given = attr if attr is not None or name is None else name
    return layer.parameter(given, shape, _dtype(dtype), is_bias=is_bias, default=default_initializer)
