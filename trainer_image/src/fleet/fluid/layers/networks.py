"""Layers with parameters, and layers that compute losses or metrics."""

from collections.abc import Sequence
from math import prod
from typing import Any

from fleet.errors import ConfigurationError
from fleet.fluid import initializer, unique_name
from fleet.fluid.building import Layer, ProgramVariable, create_variable, start_with
from fleet.fluid.param_attr import ParamAttr

__all__ = [
    "accuracy",
    "auc",
    "batch_norm",
    "conv2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "fc",
    "label_smooth",
    "layer_norm",
    "log_loss",
    "one_hot",
    "pool2d",
    "sequence_pool",
    "sigmoid_cross_entropy_with_logits",
    "softmax_with_cross_entropy",
    "square_error_cost",
    "topk",
]

Var = ProgramVariable


def fc(
    input: Var | Sequence[Var],
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Var:
    """Append a fully connected layer with one weight per input, one bias and an activation.

    Parameters
    ----------
    input : ProgramVariable or sequence of ProgramVariable
    size : int
        The number of outputs.
    num_flatten_dims : int
        The number of leading dimensions to keep; the others are flattened.
    param_attr, bias_attr : ParamAttr, str, initializer, bool or None
        See `fleet.fluid.param_attr`.
    act : str, optional
        The activation, such as ``relu``.
    name : str, optional
        The prefix of the names of its variables.

    Returns
    -------
    ProgramVariable
        The leading dimensions of the input, then `size`.
    """
    layer = Layer("fc", name)
    if param_attr is False:
        raise ConfigurationError("layers.fc: param_attr is False; expected a weight, which the layer needs")
    inputs = [input] if isinstance(input, Var) else list(input)
    attrs = list(param_attr) if isinstance(param_attr, list | tuple) else [param_attr] * len(inputs)
    products = []
    for x, attr in zip(inputs, attrs, strict=True):
        num_flatten_dims = len(x.shape) - 1 if num_flatten_dims == -1 else num_flatten_dims
        weight = layer.parameter(attr, [prod(x.shape[num_flatten_dims:]), size], x.dtype)
        products.append(layer.append("mul", {"X": x, "Y": weight}, x_num_col_dims=num_flatten_dims))
    summed = products[0] if len(products) == 1 else layer.append("sum", {"X": products})
    return layer.activated(layer.with_bias(summed, bias_attr, axis=num_flatten_dims), act)


def embedding(
    input: Var,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Var:
    """Look up rows of a table by their ids.

    Parameters
    ----------
    input : ProgramVariable
        The ids, whose last dimension has the size 1.
    size : sequence of int
        The number of rows, and the size of a row.
    is_sparse : bool
        In a job, the table's rows are on the parameter servers, and only looked-up rows are sent.
    is_distributed : bool
        As `is_sparse`.
    padding_idx : int, optional
        The id whose row is 0; negative numbers count from the end.
    param_attr : ParamAttr, str, initializer or None
        Look-ups with one name share the table.
    dtype : str

    Returns
    -------
    ProgramVariable
        The ids' shape, with the size of a row in place of the last dimension.
    """
    layer = Layer("embedding")
    if param_attr is False:
        raise ConfigurationError("layers.embedding: param_attr is False; expected a table")
    table = layer.parameter(param_attr, size, str(dtype))
    padding = -1 if padding_idx is None else padding_idx if padding_idx >= 0 else size[0] + padding_idx
    return layer.append(
        "lookup_table",
        {"Ids": input, "W": table},
        is_sparse=is_sparse,
        is_distributed=is_distributed,
        remote_prefetch=is_sparse and not is_distributed,
        padding_idx=padding,
    )


def sequence_pool(
    input: Var,
    pool_type: str,
    is_test: bool = False,
    pad_value: float = 0.0,
) -> Var:
    """Reduce each sequence to one row; `pool_type` is sum, average, sqrt, max, first or last.

    Raises
    ------
    ConfigurationError
        `pool_type` is unknown.
    """
    types = ("sum", "average", "sqrt", "max", "first", "last")
    if pool_type.lower() not in types:
        raise ConfigurationError(
            f"sequence_pool: pool_type is {pool_type!r}; expected one of {', '.join(types)}"
        )
    attrs: dict[str, Any] = {"pooltype": pool_type.upper(), "is_test": is_test, "pad_value": float(pad_value)}
    layer = Layer("sequence_pool")
    out, index = (layer.temporary(input.dtype) for _ in range(2))
    if pool_type == "max":
        index.stop()
    return layer.append("sequence_pool", {"X": input}, outputs={"Out": out, "MaxIndex": index}, **attrs)


def cross_entropy(
    input: Var,
    label: Var,
    soft_label: bool = False,
    ignore_index: int = -100,
) -> Var:
    """Return the cross entropy of probabilities; labels are class ids or, if soft, probabilities."""
    inputs = {"X": input, "Label": label}
    if soft_label:
        layer = Layer("cross_entropy")
        return layer.append("cross_entropy", inputs, soft_label=True, ignore_index=ignore_index)
    return Layer("cross_entropy2").append("cross_entropy2", inputs, ignore_index=ignore_index)


def softmax_with_cross_entropy(
    logits: Var,
    label: Var,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """Return the cross entropy of the softmax; with `return_softmax`, return the softmax too."""
    softmax, loss = Layer("softmax_with_cross_entropy").append_all(
        "softmax_with_cross_entropy",
        {"Logits": logits, "Label": label},
        soft_label=soft_label,
        ignore_index=ignore_index,
        numeric_stable_mode=numeric_stable_mode,
        axis=axis,
    )
    return (loss, softmax) if return_softmax else loss


def square_error_cost(input: Var, label: Var) -> Var:
    """Return the squared difference of each pair of elements."""
    layer = Layer("square_error_cost")
    difference = layer.append("elementwise_sub", {"X": input, "Y": label})
    return layer.append("square", {"X": difference})


def log_loss(input: Var, label: Var, epsilon: float = 1e-4, name: str | None = None) -> Var:
    """Return the cross entropy between a predicted probability and a label of 0 or 1."""
    inputs = {"Predicted": input, "Labels": label}
    return Layer("log_loss", name).append("log_loss", inputs, epsilon=float(epsilon))


def sigmoid_cross_entropy_with_logits(
    x: Var, label: Var, ignore_index: int = -100, name: str | None = None, normalize: bool = False
) -> Var:
    """Return the cross entropy between the sigmoid of logits and labels."""
    layer = Layer("sigmoid_cross_entropy_with_logits", name)
    return layer.append(
        "sigmoid_cross_entropy_with_logits",
        {"X": x, "Label": label},
        ignore_index=ignore_index,
        normalize=normalize,
    )


def topk(input: Var, k: int, name: str | None = None) -> tuple[Var, Var]:
    """Return the `k` largest values of each row and their positions; no gradients flow through them."""
    values, indices = Layer("top_k", name).append_all("top_k", {"X": input}, k=int(k))
    values.stop()
    indices.stop()
    return values, indices


def accuracy(
    input: Var,
    label: Var,
    k: int = 1,
    correct: Var | None = None,
    total: Var | None = None,
) -> Var:
    """Return the fraction of rows whose label is among the `k` largest values."""
    layer = Layer("accuracy")
    values, indices = topk(input, k)
    inputs = {"Out": values, "Indices": indices, "Label": label}
    return layer.append("accuracy", inputs, outputs={"Correct": correct, "Total": total})


def auc(
    input: Var,
    label: Var,
    curve: str = "ROC",
    num_thresholds: int = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Var, Var, list[Var]]:
    """Return the area under the ROC curve over all batches, and over the most recent batches.

    Parameters
    ----------
    input : ProgramVariable
        The probabilities of two classes; only the second column is used.
    label : ProgramVariable
    curve : str
        Only ``ROC``.
    num_thresholds : int
        The number of buckets minus one.
    topk : int
        Has no effect, as in Paddle.
    slide_steps : int
        The number of batches for the second area; 0 for all.

    Returns
    -------
    tuple
        Both areas, and the four variables that hold the counts: positives and negatives of the last batches,
        then of all.

    Raises
    ------
    ConfigurationError
        `curve` is not ``ROC``.
    """
    if curve != "ROC":
        raise ConfigurationError(f"layers.auc: curve is {curve!r}; expected 'ROC'")
    layer = Layer("auc")
    whole, batch = layer.temporary("float64"), layer.temporary("float64")
    shapes = [[(1 + slide_steps) * (num_thresholds + 1) + 1]] * 2
    states = [_state(layer, shape) for shape in (*shapes, *[[1, num_thresholds + 1]] * 2)]
    for steps, area, (positives, negatives) in ((slide_steps, batch, states[:2]), (0, whole, states[2:])):
        layer.append(
            "auc",
            {"Predict": input, "Label": label, "StatPos": positives, "StatNeg": negatives},
            outputs={"AUC": area, "StatPosOut": positives, "StatNegOut": negatives},
            curve=curve,
            num_thresholds=num_thresholds,
            slide_steps=steps,
        )
    return whole, batch, states


def _state(layer: Layer, shape: Sequence[int]) -> Var:
    name = unique_name.generate("_generated_var")
    start_with(layer.startup, name, shape, "int64", initializer.Constant(0.0, force_cpu=False))
    return create_variable(layer.main.global_block(), name, shape, "int64", persistable=True)


def one_hot(input: Var, depth: int, allow_out_of_range: bool = False) -> Var:
    """Encode each id as a one-hot vector, through which no gradients flow."""
    attrs: dict[str, Any] = {"depth": int(depth), "allow_out_of_range": allow_out_of_range}
    return Layer("one_hot").append("one_hot", {"X": input}, stop_gradient=True, **attrs)


def label_smooth(
    label: Var,
    prior_dist: Var | None = None,
    epsilon: float = 0.1,
    dtype: Any = "float32",
    name: str | None = None,
) -> Var:
    """Smooth labels by mixing them with a distribution, by default the uniform one."""
    # Paddle's layer also changes the label that it is given.
    label.stop()
    inputs = {"X": label, "PriorDist": prior_dist}
    return Layer("label_smooth", name).append("label_smooth", inputs, epsilon=float(epsilon))


def dropout(
    x: Var,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Var:
    """Set randomly chosen elements to 0."""
    layer = Layer("dropout", name)
    chosen = seed if seed else layer.main.random_seed
    out, mask = layer.temporary(x.dtype), layer.temporary("uint8", stop_gradient=True)
    return layer.append(
        "dropout",
        {"X": x},
        outputs={"Out": out, "Mask": mask},
        dropout_prob=float(dropout_prob),
        is_test=is_test,
        fix_seed=chosen != 0,
        seed=chosen,
        dropout_implementation=dropout_implementation,
    )


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _padding(given: Any) -> dict[str, Any]:
    """Return the attributes of a padding, given as one, two or four numbers, four pairs, or an algorithm."""
    if isinstance(given, str):
        if given.upper() not in ("SAME", "VALID"):
            raise ConfigurationError(f"padding is {given!r}; expected numbers, 'SAME' or 'VALID'")
        return {"paddings": [0, 0], "padding_algorithm": given.upper()}
    sizes: list[Any] = _pair(given)
    if len(sizes) == 4 and not isinstance(sizes[0], int):
        if any(map(any, sizes[:2])):
            raise ConfigurationError(
                f"padding is {given!r}; expected no padding of the batch and the channels"
            )
        sizes = [each for pair in sizes[2:] for each in pair]
    if len(sizes) == 4 and sizes[0] == sizes[1] and sizes[2] == sizes[3]:
        sizes = sizes[::2]
    if len(sizes) not in (2, 4):
        raise ConfigurationError(f"padding is {given!r}; expected one, two or four numbers")
    return {"paddings": sizes, "padding_algorithm": "EXPLICIT"}


def _check_layout(given: str) -> None:
    if given != "NCHW":
        raise ConfigurationError(f"data_format is {given!r}; expected 'NCHW', as PyTorch computes")


def conv2d(
    input: Var,
    num_filters: int,
    filter_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[Any] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Var:
    """Append a 2-D convolution with one bias per filter, and an activation."""
    _check_layout(data_format)
    channels, count, window = input.shape[1], groups or 1, _pair(filter_size)
    depthwise = count == channels and num_filters % channels == 0 and not use_cudnn
    type = "depthwise_conv2d" if depthwise else "conv2d"
    layer = Layer(type, name)
    default = initializer.default_conv2d(window, channels)
    weight = layer.parameter(
        param_attr, [num_filters, channels // count, *window], input.dtype, default=default
    )
    out = layer.append(
        type,
        {"Input": input, "Filter": weight},
        strides=_pair(stride),
        **_padding(padding),
        dilations=_pair(dilation),
        groups=count,
    )
    if bias_attr is not False:
        bias = layer.parameter(bias_attr, [num_filters], input.dtype, is_bias=True)
        out = layer.append("elementwise_add", {"X": out, "Y": bias}, axis=1)
    return layer.activated(out, act)


def pool2d(
    input: Var,
    pool_size: int | Sequence[int] = -1,
    pool_type: str = "max",
    pool_stride: int | Sequence[int] = 1,
    pool_padding: int | Sequence[Any] | str = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCHW",
) -> Var:
    """Reduce each window of an image to its maximum or average."""
    _check_layout(data_format)
    return Layer("pool2d", name).append(
        "pool2d",
        {"X": input},
        pooling_type=pool_type,
        ksize=_pair(pool_size),
        global_pooling=global_pooling,
        strides=_pair(pool_stride),
        **_padding(pool_padding),
        ceil_mode=ceil_mode,
        exclusive=exclusive,
    )


def batch_norm(
    input: Var,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Var:
    """Normalize over the batch; the running statistics are parameters without gradients."""
    _check_layout(data_layout)
    layer, sizes = Layer("batch_norm", name), [input.shape[1]]
    weight = layer.parameter(param_attr, sizes, "float32", default=initializer.Constant(1.0))
    bias = layer.parameter(bias_attr, sizes, "float32", is_bias=True)
    moving = []
    for moving_name, value in ((moving_mean_name, 0.0), (moving_variance_name, 1.0)):
        attr = ParamAttr(name=moving_name, initializer=initializer.Constant(value), trainable=False)
        moving.append(layer.parameter(attr, sizes, "float32"))
        moving[-1].stop()
    saved = [layer.temporary("float32", stop_gradient=True) for _ in range(2)]
    out = layer.append(
        "batch_norm",
        {"X": input, "Scale": weight, "Bias": bias, "Mean": moving[0], "Variance": moving[1]},
        outputs={
            "Y": input if in_place else None,
            "MeanOut": moving[0],
            "VarianceOut": moving[1],
            "SavedMean": saved[0],
            "SavedVariance": saved[1],
        },
        momentum=float(momentum),
        epsilon=float(epsilon),
        is_test=is_test,
        use_global_stats=use_global_stats,
    )
    return layer.activated(out, act)


def layer_norm(
    input: Var,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-05,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Var:
    """Normalize over the dimensions from `begin_norm_axis` on."""
    layer, sizes = Layer("layer_norm", name), [prod(input.shape[begin_norm_axis:])]
    inputs: dict[str, Any] = {"X": input}
    if scale:
        inputs["Scale"] = layer.parameter(param_attr, sizes, input.dtype, default=initializer.Constant(1.0))
    if shift:
        inputs["Bias"] = layer.parameter(bias_attr, sizes, input.dtype, is_bias=True)
    outputs = {slot: layer.temporary("float32", stop_gradient=True) for slot in ("Mean", "Variance")}
    attrs: dict[str, Any] = {"begin_norm_axis": begin_norm_axis, "epsilon": float(epsilon)}
    return layer.activated(layer.append_all("layer_norm", inputs, outputs=outputs, **attrs)[2], act)
