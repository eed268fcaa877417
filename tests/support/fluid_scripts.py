"""Training scripts whose programs and steps were recorded with paddlepaddle 1.8.5.

Each function takes the module ``fluid`` of Paddle or of this package, builds the default programs, minimizes
a loss, and returns the loss. Paddle runs this module on Python 3.7.
"""

from __future__ import annotations

from typing import Any

SCRIPTS: dict[str, Any] = {}


def script(function: Any) -> Any:
    SCRIPTS[function.__name__] = function
    return function


def regression(fluid: Any, x: Any, **attrs: Any) -> Any:
    """Return the mean squared error between the output of a linear layer on `x` and the data `y`."""
    y = fluid.layers.data("y", [1])
    return fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1, **attrs), y))


@script
def one_weight_with_two_regularizers(fluid: Any) -> Any:
    x = fluid.layers.data("x", [4])
    for coefficient in (0.1, 0.2):
        attr = fluid.ParamAttr(name="shared", regularizer=fluid.regularizer.L2Decay(coefficient))
        x = fluid.layers.fc(x, 4, param_attr=attr, act="tanh")
    loss = regression(fluid, x)
    fluid.optimizer.SGD(0.1, regularization=fluid.regularizer.L1Decay(0.01)).minimize(loss)
    return loss


@script
def gradients_that_end_by_name(fluid: Any) -> Any:
    hidden = fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="relu")
    loss = regression(fluid, hidden)
    fluid.optimizer.SGD(0.1).minimize(loss, no_grad_set={"fc_0.b_0"})
    return loss


@script
def gradients_that_end_at_a_hidden_layer(fluid: Any) -> Any:
    hidden = fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="relu")
    hidden.stop_gradient = True
    loss = regression(fluid, hidden)
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@script
def some_parameters_by_name(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="sigmoid"))
    fluid.optimizer.SGD(0.1).minimize(loss, parameter_list=["fc_0.w_0", "fc_1.b_0"])
    return loss


@script
def some_parameters_of_the_optimizer(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="sigmoid"))
    chosen = [each for each in fluid.default_main_program().all_parameters() if "w" in each.name]
    fluid.optimizer.Momentum(0.1, 0.9, parameter_list=chosen).minimize(loss)
    return loss


@script
def a_value_with_three_readers(fluid: Any) -> Any:
    hidden = fluid.layers.fc(fluid.layers.data("x", [4]), 3)
    total = fluid.layers.sums([fluid.layers.tanh(hidden), hidden, hidden * hidden])
    loss = regression(fluid, total + hidden)
    fluid.optimizer.SGD(0.05).minimize(loss)
    return loss


@script
def a_layer_that_is_not_read(fluid: Any) -> Any:
    x = fluid.layers.data("x", [4])
    fluid.layers.fc(x, 7, name="aside")
    loss = regression(fluid, fluid.layers.fc(x, 3, act="relu"))
    fluid.optimizer.Adagrad(0.1).minimize(loss)
    return loss


@script
def a_loss_of_two_terms(fluid: Any) -> Any:
    x = fluid.layers.data("x", [4])
    hidden = fluid.layers.fc(x, 4, param_attr="w")
    weight = fluid.default_main_program().global_block().var("w")
    penalty = fluid.layers.reduce_sum(fluid.layers.square(weight))
    loss = regression(fluid, hidden) + 0.1 * penalty
    fluid.optimizer.SGD(0.05).minimize(loss)
    return loss


@script
def two_halves_of_minimize(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="tanh"))
    optimizer = fluid.optimizer.RMSProp(0.01, momentum=0.5, centered=True)
    optimizer.apply_gradients(optimizer.backward(loss))
    return loss


@script
def factors_of_a_schedule(fluid: Any) -> Any:
    attr = fluid.ParamAttr(name="slow", learning_rate=0.1)
    hidden = fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="tanh", param_attr=attr, bias_attr=False)
    loss = regression(fluid, hidden)
    rate = fluid.layers.exponential_decay(0.1, 2, 0.5)
    fluid.optimizer.Momentum(rate, 0.9, use_nesterov=True).minimize(loss)
    return loss


@script
def warmup_before_steps(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.data("x", [4]))
    rate = fluid.layers.linear_lr_warmup(
        fluid.layers.piecewise_decay([3, 4], [0.1, 0.05, 0.01]), warmup_steps=2, start_lr=0.0, end_lr=0.1
    )
    fluid.optimizer.Adam(rate).minimize(loss)
    return loss


@script
def a_rate_of_the_script(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.data("x", [4]))
    rate = fluid.layers.create_global_var([1], 0.1, "float32", persistable=True, name="rate")
    fluid.optimizer.SGD(rate).minimize(loss)
    return loss


@script
def clipping_for_all_and_l2(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="relu"))
    fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(0.5))
    fluid.optimizer.SGD(0.1, regularization=fluid.regularizer.L2Decay(0.1)).minimize(loss)
    return loss


@script
def clipping_by_value_and_l1(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.data("x", [4]))
    clip = fluid.clip.GradientClipByValue(0.2)
    decay = fluid.regularizer.L1Decay(0.1)
    fluid.optimizer.Momentum(0.1, 0.5, regularization=decay, grad_clip=clip).minimize(loss)
    return loss


@script
def a_sparse_table_of_two_look_ups(fluid: Any) -> Any:
    rows = [
        fluid.layers.embedding(
            fluid.layers.data(name, [1], dtype="int64"), [9, 3], is_sparse=True, param_attr="table"
        )
        for name in ("i", "j")
    ]
    loss = regression(fluid, fluid.layers.concat(rows, axis=1))
    fluid.optimizer.Adagrad(0.1).minimize(loss)
    return loss


@script
def a_sparse_table_with_l2(fluid: Any) -> Any:
    ids = fluid.layers.data("i", [1], dtype="int64")
    loss = regression(fluid, fluid.layers.embedding(ids, [9, 3], is_sparse=True, param_attr="table"))
    clip = fluid.clip.GradientClipByGlobalNorm(0.1)
    decay = fluid.regularizer.L2Decay(0.1)
    fluid.optimizer.SGD(0.1, regularization=decay, grad_clip=clip).minimize(loss)
    return loss


@script
def sequences_of_two_levels(fluid: Any) -> Any:
    ids = fluid.layers.data("words", [1], dtype="int64", lod_level=2)
    rows = fluid.layers.embedding(ids, [9, 3], is_sparse=True)
    sentences = fluid.layers.sequence_pool(rows, "sum")
    documents = fluid.layers.sequence_pool(fluid.layers.fc(sentences, 3, act="tanh"), "max")
    loss = fluid.layers.mean(fluid.layers.fc(documents, 1))
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@script
def a_seed_of_the_program(fluid: Any) -> Any:
    fluid.default_startup_program().random_seed = 5
    fluid.default_main_program().random_seed = 7
    attr = fluid.ParamAttr(initializer=fluid.initializer.Uniform(seed=3))
    hidden = fluid.layers.fc(fluid.layers.data("x", [4]), 3, param_attr=attr)
    loss = regression(fluid, fluid.layers.dropout(hidden, 0.0))
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@script
def a_block_of_resnet(fluid: Any) -> Any:
    layers = fluid.layers
    image = layers.data("image", [3, 8, 8])
    label = layers.data("label", [1], dtype="int64")

    def convolved(x: Any, filters: int, size: int, stride: int = 1, act: Any = None, name: str = "") -> Any:
        made = layers.conv2d(
            x,
            filters,
            size,
            stride,
            (size - 1) // 2,
            param_attr=name + "_weights",
            bias_attr=False,
            name=name,
        )
        return layers.batch_norm(
            made,
            act=act,
            param_attr=fluid.ParamAttr(name=name + "_scale"),
            bias_attr=fluid.ParamAttr(name + "_offset"),
            moving_mean_name=name + "_mean",
            moving_variance_name=name + "_variance",
        )

    x = convolved(image, 4, 3, act="relu", name="stem")
    x = layers.pool2d(x, pool_size=3, pool_stride=2, pool_padding=1, pool_type="max")
    deep = convolved(convolved(x, 4, 3, 2, "relu", "a"), 8, 1, name="b")
    x = layers.elementwise_add(convolved(x, 8, 1, 2, name="short"), deep, act="relu")
    x = layers.pool2d(x, pool_type="avg", global_pooling=True)
    initializer = fluid.initializer.Uniform(-0.3, 0.3)
    out = layers.fc(x, 3, param_attr=fluid.param_attr.ParamAttr(initializer=initializer))
    smooth = layers.label_smooth(layers.one_hot(label, 3), epsilon=0.1)
    loss = layers.mean(layers.softmax_with_cross_entropy(out, smooth, soft_label=True))
    layers.accuracy(layers.softmax(out), label, k=2)
    rate = layers.piecewise_decay(boundaries=[2, 4], values=[0.1, 0.01, 0.001])
    fluid.optimizer.Momentum(rate, 0.9, regularization=fluid.regularizer.L2Decay(1e-4)).minimize(loss)
    return loss


@script
def a_block_of_bert(fluid: Any) -> Any:
    layers, heads, width, length, words = fluid.layers, 2, 8, 5, 11
    normal = fluid.initializer.TruncatedNormal(scale=0.2)
    source = layers.data("src", [length, 1], dtype="int64")
    position = layers.data("pos", [length, 1], dtype="int64")
    mask = layers.data("mask", [length, 1])
    place = layers.data("place", [1], dtype="int64")
    label = layers.data("label", [1], dtype="int64")

    def dense(x: Any, size: int, name: str, act: Any = None) -> Any:
        return layers.fc(
            x,
            size,
            num_flatten_dims=2,
            act=act,
            param_attr=fluid.ParamAttr(name=name + ".w_0", initializer=normal),
            bias_attr=name + ".b_0",
        )

    def normalized(x: Any, name: str) -> Any:
        return layers.layer_norm(
            x,
            begin_norm_axis=len(x.shape) - 1,
            param_attr=fluid.ParamAttr(name + "_scale", initializer=fluid.initializer.Constant(1.0)),
            bias_attr=fluid.ParamAttr(name + "_bias", initializer=fluid.initializer.Constant(0.0)),
        )

    table = fluid.ParamAttr(name="word_embedding", initializer=normal)
    x = layers.embedding(source, [words, width], param_attr=table)
    x = x + layers.embedding(position, [words, width], param_attr=fluid.ParamAttr("pos_embedding"))
    x = layers.dropout(normalized(x, "pre"), 0.0, dropout_implementation="upscale_in_train")
    attention = layers.matmul(mask, mask, transpose_y=True)
    attention = layers.scale(attention, scale=10000.0, bias=-1.0, bias_after_scale=False)
    attention = layers.stack([attention] * heads, axis=1)
    attention.stop_gradient = True

    def split(value: Any) -> Any:
        return layers.transpose(
            layers.reshape(value, [0, 0, heads, width // heads], inplace=True), [0, 2, 1, 3]
        )

    query, key, value = (split(dense(x, width, name)) for name in ("query", "key", "value"))
    product = layers.matmul(layers.scale(query, scale=(width // heads) ** -0.5), key, transpose_y=True)
    weights = layers.softmax(product + attention)
    heads_out = layers.transpose(layers.matmul(weights, value), [0, 2, 1, 3])
    x = normalized(x + dense(layers.reshape(heads_out, [0, 0, width]), width, "output"), "post_att")
    x = normalized(x + dense(dense(x, 16, "ffn_0", "gelu"), width, "ffn_1"), "post_ffn")
    pooled = layers.fc(layers.slice(x, axes=[1], starts=[0], ends=[1]), width, act="tanh", name="pooled_fc")
    chosen = layers.gather(layers.reshape(x, [-1, width]), layers.cast(place, "int32"))
    logits = layers.matmul(
        chosen, fluid.default_main_program().global_block().var("word_embedding"), transpose_y=True
    )
    bias = layers.create_parameter([words], "float32", attr=fluid.ParamAttr("mask_lm_bias"), is_bias=True)
    masked = layers.mean(layers.softmax_with_cross_entropy(logits + bias, label))
    loss = masked + layers.mean(layers.square(pooled))
    rate = layers.learning_rate_scheduler.noam_decay(width, 2)
    fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(clip_norm=1.0))
    fluid.optimizer.Adam(rate, epsilon=1e-6).minimize(loss)
    return loss


@script
def clipping_for_all_by_value(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="relu"))
    fluid.clip.set_gradient_clip(fluid.clip.GradientClipByValue(0.1, -0.2))
    fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
    return loss


@script
def clipping_for_all_by_norm(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="relu"))
    fluid.clip.set_gradient_clip(fluid.clip.GradientClipByNorm(0.2))
    fluid.optimizer.RMSProp(0.01).minimize(loss)
    return loss


@script
def one_input_twice(fluid: Any) -> Any:
    x = fluid.layers.data("x", [4])
    hidden = fluid.layers.fc([x, x], 3, act="tanh")
    loss = regression(fluid, fluid.layers.elementwise_mul(hidden, hidden))
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@script
def outputs_that_are_not_read(fluid: Any) -> Any:
    x = fluid.layers.fc(fluid.layers.data("x", [4]), 4)
    values, _ = fluid.layers.topk(x, 2)
    halves = fluid.layers.unstack(fluid.layers.reshape(x, [-1, 2, 2]), axis=1)
    loss = regression(fluid, fluid.layers.concat([x, halves[1]], axis=1)) + fluid.layers.mean(values)
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@script
def a_parameter_of_two_layers(fluid: Any) -> Any:
    ids = fluid.layers.data("i", [1], dtype="int64")
    attr = fluid.ParamAttr(name="table", learning_rate=0.5)
    rows = fluid.layers.embedding(ids, [5, 3], param_attr=attr)
    table = fluid.default_main_program().global_block().var("table")
    scores = fluid.layers.matmul(rows, table, transpose_y=True)
    label = fluid.layers.data("label", [1], dtype="int64")
    loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(scores, label))
    fluid.optimizer.Adagrad(0.1, initial_accumulator_value=0.1).minimize(loss)
    return loss


@script
def operators_of_rare_arguments(fluid: Any) -> Any:
    import numpy as np

    layers = fluid.layers
    x, label = layers.data("x", [2, 4]), layers.data("label", [-1], append_batch_size=False, dtype="int64")
    hidden = layers.fc(x, 4, num_flatten_dims=2, act="leaky_relu")
    spread = layers.elementwise_mul(layers.reduce_max(hidden, dim=1, keep_dim=True), hidden)
    ratio = spread / layers.exp(hidden)
    parts = [ratio[:, 0], ratio[:, -1], ratio[:, 0:1, 1:]]
    parts[2] = layers.reduce_min(parts[2], dim=[1])
    clipped = layers.clip(layers.concat(parts, axis=1), -1.0, 1.0, name="clipped")
    shifted = layers.elementwise_add(clipped, layers.assign(np.arange(11, dtype="float32") / 10))
    loss = layers.mean(layers.cross_entropy(layers.softmax(shifted), label))
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@script
def images_with_uneven_borders(fluid: Any) -> Any:
    layers = fluid.layers
    x = layers.conv2d(layers.data("x", [2, 7, 7]), 4, 3, groups=2, use_cudnn=False, act="relu")
    x = layers.batch_norm(x, use_global_stats=True)
    pooled = [
        layers.pool2d(x, 3, "avg", 2, 1, ceil_mode=True, exclusive=False),
        layers.pool2d(x, 2, "avg", 2, [0, 1, 1, 0]),
        layers.pool2d(x, 2, "avg", 2, "SAME"),
    ]
    loss = layers.mean(layers.sums([layers.reduce_mean(layers.square(each)) for each in pooled]))
    fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
    return loss


@script
def a_named_optimizer_of_listed_parameters(fluid: Any) -> Any:
    loss = regression(fluid, fluid.layers.fc(fluid.layers.data("x", [4]), 3, act="sigmoid"))
    chosen = ["fc_1.w_0", "fc_0.w_0"]
    fluid.optimizer.Adam(0.1, name="listed", parameter_list=chosen).minimize(loss)
    return loss
