"""Models from Paddle's documentation and examples, with the same layers but small tables.

Each function declares the data, appends the model to the default program, and returns the loss and the other
variables that a script fetches.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

from fleet import fluid

IDS = 10001
"""The number of rows in a table."""


class Model(NamedTuple):
    """A model, and the variables that a training script uses."""

    loss: Any
    data: list[Any]
    fetched: dict[str, Any]


def mlp() -> Model:
    x, y = fluid.layers.data(name="x", shape=[32]), fluid.layers.data(name="y", shape=[1], dtype="int64")
    hidden = fluid.layers.fc(input=x, size=128, act="tanh")
    hidden = fluid.layers.fc(input=hidden, size=128, act="tanh")
    prediction = fluid.layers.fc(input=[hidden], size=2, act="softmax")
    cost = fluid.layers.cross_entropy(input=prediction, label=y)
    return Model(fluid.layers.mean(x=cost), [x, y], {})


def fit_a_line() -> Model:
    y, x = fluid.layers.data(name="y", shape=[1]), fluid.layers.data(name="x", shape=[13])
    predicted = fluid.layers.fc(input=x, size=1, act=None)
    return Model(fluid.layers.mean(fluid.layers.square_error_cost(input=predicted, label=y)), [x, y], {})


def ctr(
    *,
    slots: int = 3,
    ids: int = IDS,
    width: int = 10,
    hidden: int = 400,
    thresholds: int = 2**12,
    window: int = 20,
    pool: bool = False,
    accuracy: bool = True,
    distributed: bool = False,
    given: Callable[[list[Any]], list[Any]] | None = None,
) -> Model:
    """Build a model of dense counts, and of ids that share one table; `given` can add a reader."""
    dense = fluid.layers.data(name="dense_input", shape=[13], dtype="float32")
    sparse = [
        fluid.layers.data(name=f"C{slot}", shape=[1], lod_level=1, dtype="int64")
        for slot in range(1, slots + 1)
    ]
    label = fluid.layers.data(name="label", shape=[1], dtype="int64")
    data = [dense, *sparse, label]
    dense, *sparse, label = given(data) if given is not None else data

    def looked_up(words: Any) -> Any:
        rows = fluid.layers.embedding(
            input=words,
            size=[ids, width],
            is_sparse=True,
            is_distributed=distributed,
            param_attr=fluid.ParamAttr(name="SparseFeatFactors", initializer=fluid.initializer.Uniform()),
        )
        return fluid.layers.sequence_pool(input=rows, pool_type="sum") if pool else rows

    x = fluid.layers.concat([*map(looked_up, sparse), dense], axis=1)
    for _ in range(3):
        normal = fluid.initializer.Normal(scale=1 / sqrt(x.shape[1]))
        x = fluid.layers.fc(input=x, size=hidden, act="relu", param_attr=fluid.ParamAttr(initializer=normal))
    normal = fluid.initializer.Normal(scale=1 / sqrt(x.shape[1]))
    predicted = fluid.layers.fc(
        input=x, size=2, act="softmax", param_attr=fluid.ParamAttr(initializer=normal)
    )
    loss = fluid.layers.reduce_sum(fluid.layers.cross_entropy(input=predicted, label=label))
    found = {"accuracy": fluid.layers.accuracy(input=predicted, label=label)} if accuracy else {}
    auc, batch_auc, _ = fluid.layers.auc(
        input=predicted, label=label, num_thresholds=thresholds, slide_steps=window
    )
    return Model(loss, data, {**found, "auc": auc, "batch_auc": batch_auc})


def distribute_ctr(**options: Any) -> Model:
    return ctr(accuracy=False, distributed=True, **options)


def word2vec(*, ids: int = IDS, width: int = 10, negatives: int = 5) -> Model:
    """Build a skip-gram model with negative sampling."""
    words = [
        fluid.layers.data(name=name, shape=[1], lod_level=1, dtype="int64")
        for name in ("input_word", "true_label", "neg_label")
    ]
    word, true, _ = words

    def embedding(ids_of: Any, name: str, size: int, initializer: Any) -> Any:
        attr = fluid.ParamAttr(name=name, initializer=initializer)
        return fluid.layers.embedding(input=ids_of, is_sparse=True, size=[ids, size], param_attr=attr)

    zero = fluid.initializer.Constant(value=0.0)
    uniform = fluid.initializer.Uniform(-0.5 / width, 0.5 / width)
    word_emb = embedding(word, "emb", width, uniform)
    true_w, true_b = embedding(true, "emb_w", width, zero), embedding(true, "emb_b", 1, zero)
    negative: Any = fluid.layers.reshape(words[2], shape=[-1, 1])
    negative.stop_gradient = True
    negative_w = fluid.layers.reshape(embedding(negative, "emb_w", width, zero), shape=[-1, negatives, width])
    negative_b = fluid.layers.reshape(embedding(negative, "emb_b", 1, zero), shape=[-1, negatives])
    true_logits = fluid.layers.elementwise_add(
        fluid.layers.reduce_sum(fluid.layers.elementwise_mul(word_emb, true_w), dim=1, keep_dim=True), true_b
    )
    product = fluid.layers.matmul(
        fluid.layers.reshape(word_emb, shape=[-1, 1, width]), negative_w, transpose_y=True
    )
    negative_logits = fluid.layers.elementwise_add(
        fluid.layers.reshape(product, shape=[-1, negatives]), negative_b
    )
    ones = fluid.layers.fill_constant_batch_size_like(true_logits, [-1, 1], "float32", 1.0)
    zeros = fluid.layers.fill_constant_batch_size_like(true_logits, [-1, negatives], "float32", 0.0)
    true_xent = fluid.layers.sigmoid_cross_entropy_with_logits(true_logits, ones)
    negative_xent = fluid.layers.sigmoid_cross_entropy_with_logits(negative_logits, zeros)
    cost = fluid.layers.elementwise_add(
        fluid.layers.reduce_sum(true_xent, dim=1), fluid.layers.reduce_sum(negative_xent, dim=1)
    )
    return Model(fluid.layers.reduce_mean(cost), words, {})


def deepfm(*, fields: int = 4, ids: int = IDS, width: int = 8, hidden: int = 64) -> Model:
    """Build a factorization machine and a network on tables of weights and embeddings."""
    index = fluid.layers.data(name="feat_idx", shape=[fields], dtype="int64")
    value = fluid.layers.data(name="feat_value", shape=[fields], dtype="float32")
    label = fluid.layers.data(name="label", shape=[1], dtype="float32")

    def truncated(scale: float) -> Any:
        return fluid.initializer.TruncatedNormalInitializer(loc=0.0, scale=scale)

    indices = fluid.layers.reshape(index, [-1, fields, 1])
    values = fluid.layers.reshape(value, [-1, fields, 1])
    first_weights = fluid.layers.embedding(
        input=indices,
        size=[ids, 1],
        padding_idx=0,
        dtype="float32",
        param_attr=fluid.ParamAttr(
            initializer=truncated(0.1), regularizer=fluid.regularizer.L1DecayRegularizer(1e-4)
        ),
    )
    first = fluid.layers.reduce_sum(first_weights * values, 1)
    embeddings = fluid.layers.embedding(
        input=indices,
        size=[ids, width],
        padding_idx=0,
        dtype="float32",
        param_attr=fluid.ParamAttr(initializer=truncated(0.1 / sqrt(width))),
    )
    scaled = embeddings * values
    summed_square = fluid.layers.square(fluid.layers.reduce_sum(scaled, 1))
    squared_sum = fluid.layers.reduce_sum(fluid.layers.square(scaled), 1)
    second = 0.5 * fluid.layers.reduce_sum(summed_square - squared_sum, 1, keep_dim=True)
    x = fluid.layers.reshape(scaled, [-1, fields * width])
    for _ in range(2):
        x = fluid.layers.fc(
            input=x,
            size=hidden,
            act="relu",
            param_attr=fluid.ParamAttr(initializer=truncated(0.1 / sqrt(10))),
            bias_attr=fluid.ParamAttr(initializer=truncated(0.1)),
        )
    deep = fluid.layers.fc(
        input=x,
        size=1,
        param_attr=fluid.ParamAttr(initializer=truncated(0.1)),
        bias_attr=fluid.ParamAttr(initializer=truncated(0.1)),
    )
    predicted = fluid.layers.sigmoid(first + second + deep)
    loss = fluid.layers.reduce_sum(fluid.layers.log_loss(input=predicted, label=label))
    both = fluid.layers.concat([1 - predicted, predicted], axis=1)
    auc, batch_auc, _ = fluid.layers.auc(
        input=both, label=fluid.layers.cast(x=label, dtype="int64"), slide_steps=0
    )
    return Model(loss, [index, value, label], {"auc": auc, "batch_auc": batch_auc})


def simnet_bow(
    *,
    ids: int = IDS,
    width: int = 16,
    batch: int = 8,
    given: Callable[[list[Any]], list[Any]] | None = None,
) -> Model:
    """Build a bag-of-words model that ranks two titles for a query."""
    data = [
        fluid.layers.data(name=name, shape=[1], dtype="int64", lod_level=1)
        for name in ("query", "pos_title", "neg_title")
    ]
    query, positive, negative = given(data) if given is not None else data

    def bag(words: Any, rate: float | None) -> Any:
        attr: dict[str, Any] = {"name": "__emb__", "initializer": fluid.initializer.Xavier()}
        rows = fluid.layers.embedding(
            input=words,
            size=[ids, width],
            is_sparse=True,
            param_attr=fluid.ParamAttr(**attr, learning_rate=rate or 1.0),
        )
        return fluid.layers.softsign(fluid.layers.sequence_pool(input=rows, pool_type="sum"))

    def title(words: Any, rate: float | None) -> Any:
        return fluid.layers.fc(
            input=bag(words, rate),
            size=width,
            param_attr=fluid.ParamAttr(
                name="__fc__", learning_rate=0.2, initializer=fluid.initializer.Xavier()
            ),
            bias_attr=fluid.ParamAttr(name="__fc_b__", initializer=fluid.initializer.Xavier()),
        )

    asked = fluid.layers.fc(
        input=bag(query, 0.6),
        size=width,
        param_attr=fluid.ParamAttr(
            name="__q_fc__", learning_rate=0.2, initializer=fluid.initializer.Xavier()
        ),
    )
    near = fluid.layers.cos_sim(asked, title(positive, 0.6))
    far = fluid.layers.cos_sim(asked, title(negative, None))
    margin = fluid.layers.fill_constant_batch_size_like(input=near, shape=[-1, 1], value=0.1, dtype="float32")
    apart = fluid.layers.elementwise_add(fluid.layers.elementwise_sub(margin, near), far)
    zero = fluid.layers.fill_constant_batch_size_like(input=apart, shape=[-1, 1], value=0.0, dtype="float32")
    loss = fluid.layers.mean(fluid.layers.elementwise_max(zero, apart))
    right = fluid.layers.reduce_sum(fluid.layers.cast(fluid.layers.less_than(far, near), dtype="float64"))
    total = fluid.layers.fill_constant(shape=[1], dtype="float64", value=float(batch))
    return Model(loss, data, {"accuracy": fluid.layers.elementwise_div(right, total, name="simnet_acc")})


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "fit_a_line": fit_a_line,
    "ctr": ctr,
    "ctr_sequence_pool": lambda: ctr(pool=True),
    "distribute_ctr_script": lambda: ctr(accuracy=False),
    "distribute_ctr": distribute_ctr,
    "distribute_ctr_one_slot": lambda: distribute_ctr(slots=1),
    "word2vec": word2vec,
    "deepfm": deepfm,
    "simnet_bow": simnet_bow,
}
