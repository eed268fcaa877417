"""Models of the original's examples at their full depth, with few channels, take a step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleet import fluid
from fleet.fluid import layers

Model = tuple[Any, dict[str, Any], dict[str, int]]

pytestmark = pytest.mark.usefixtures("own_programs")


def _resnet50() -> Model:
    """Bottleneck blocks in four stages of 3, 4, 6 and 3 (He et al., 2015), of 4 channels in place of 64."""

    def convolved(x: Any, filters: int, size: int, stride: int = 1, act: str | None = None) -> Any:
        made = layers.conv2d(x, filters, size, stride, (size - 1) // 2, bias_attr=False)
        return layers.batch_norm(made, act=act)

    def bottleneck(x: Any, filters: int, stride: int) -> Any:
        deep = convolved(x, filters, 1, act="relu")
        deep = convolved(convolved(deep, filters, 3, stride, "relu"), 4 * filters, 1)
        changed = x.shape[1] != 4 * filters or stride != 1
        short = convolved(x, 4 * filters, 1, stride) if changed else x
        return layers.elementwise_add(short, deep, act="relu")

    image, label = layers.data("image", [3, 32, 32]), layers.data("label", [1], dtype="int64")
    x = convolved(image, 4, 7, 2, "relu")
    x = layers.pool2d(x, pool_size=3, pool_stride=2, pool_padding=1, pool_type="max")
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            x = bottleneck(x, 4 * 2**stage, 2 if block == 0 and stage else 1)
    x = layers.pool2d(x, pool_type="avg", global_pooling=True)
    loss = layers.mean(layers.softmax_with_cross_entropy(layers.fc(x, 10), label))
    random = np.random.default_rng(0)
    feed = {
        "image": random.random((4, 3, 32, 32), dtype="float32"),
        "label": random.integers(0, 10, (4, 1)),
    }
    decay = fluid.regularizer.L2Decay(1e-4)
    fluid.optimizer.Momentum(0.02, 0.9, regularization=decay).minimize(loss)
    return loss, feed, {"conv2d": 53, "batch_norm": 53, "conv2d_grad": 53, "momentum": 161}


def _bert_base() -> Model:
    """12 layers of 12 heads (Devlin et al., 2018), of width 24 in place of 768, for masked words."""
    words, length, width, heads, depth = 50, 6, 24, 12, 12
    normal = fluid.initializer.TruncatedNormal(scale=0.02)

    def dense(x: Any, size: int, act: str | None = None) -> Any:
        attr = fluid.ParamAttr(initializer=normal)
        return layers.fc(x, size, num_flatten_dims=2, act=act, param_attr=attr)

    def normalized(x: Any) -> Any:
        return layers.layer_norm(layers.dropout(x, 0.1), begin_norm_axis=2)

    def split(x: Any) -> Any:
        return layers.transpose(layers.reshape(x, [0, 0, heads, width // heads]), [0, 2, 1, 3])

    names = ("word", "position", "sentence")
    ids = {name: layers.data(name, [length, 1], dtype="int64") for name in names}
    mask = layers.data("mask", [length, 1])
    place, label = layers.data("place", [1], dtype="int64"), layers.data("label", [1], dtype="int64")
    x = layers.sum(
        [
            layers.embedding(
                given, [words, width], param_attr=fluid.ParamAttr(f"{name}_table", initializer=normal)
            )
            for name, given in ids.items()
        ]
    )
    x = normalized(x)
    bias: Any = layers.scale(
        layers.matmul(mask, mask, transpose_y=True), scale=10000.0, bias=-1.0, bias_after_scale=False
    )
    bias = layers.stack([bias] * heads, axis=1)
    bias.stop_gradient = True
    for _ in range(depth):
        query, key, value = (split(dense(x, width)) for _ in range(3))
        product = layers.matmul(layers.scale(query, scale=(width // heads) ** -0.5), key, transpose_y=True)
        found = layers.matmul(layers.dropout(layers.softmax(product + bias), 0.1), value)
        found = layers.reshape(layers.transpose(found, [0, 2, 1, 3]), [0, 0, width])
        x = normalized(x + dense(found, width))
        x = normalized(x + dense(dense(x, 4 * width, "gelu"), width))
    chosen = layers.gather(layers.reshape(x, [-1, width]), layers.cast(place, "int32"))
    table: Any = fluid.default_main_program().global_block().var("word_table")
    logits = layers.matmul(layers.fc(chosen, width, act="gelu"), table, transpose_y=True)
    loss = layers.mean(layers.softmax_with_cross_entropy(logits, label))
    random = np.random.default_rng(0)
    feed = {name: random.integers(0, words, (2, length, 1)) for name in ids}
    feed |= {"mask": np.ones((2, length, 1), "float32"), "place": np.array([[1], [8]])}
    feed |= {"label": np.array([[3], [4]])}
    rate = layers.learning_rate_scheduler.noam_decay(width, 4)
    fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(1.0))
    fluid.optimizer.Adam(rate).minimize(loss)
    counts = {"layer_norm": 25, "softmax": 12, "lookup_table": 3, "layer_norm_grad": 25, "adam": 199}
    return loss, feed, counts


@pytest.mark.parametrize("build", [_resnet50, _bert_base])
def test_a_model_of_full_depth_takes_a_step(build: Callable[[], Model]) -> None:
    main, startup = fluid.default_main_program(), fluid.default_startup_program()
    main.random_seed = startup.random_seed = 1
    loss, feed, counts = build()
    found = Counter(op.type for op in main.global_block().ops)
    assert {name: found[name] for name in counts} == counts
    tested = main.clone(for_test=True)
    executor, scope = fluid.Executor(fluid.CPUPlace()), fluid.global_scope()
    executor.run(startup)
    trained = [each.name for each in main.all_parameters() if each.trainable]
    (before,) = executor.run(tested, feed=feed, fetch_list=[loss])
    values = {name: np.array(scope.var(name).get_tensor()) for name in trained}
    _, *gradients = executor.run(main, feed=feed, fetch_list=[loss, *(f"{name}@GRAD" for name in trained)])
    for name, gradient in zip(trained, gradients, strict=True):
        assert np.isfinite(gradient).all(), name
        assert np.abs(gradient).sum() > 0, name
        assert not np.array_equal(np.array(scope.var(name).get_tensor()), values[name])
    (after,) = executor.run(tested, feed=feed, fetch_list=[loss])
    assert np.isfinite([before, after]).all()
