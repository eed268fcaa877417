"""A built program trains equally from feeds, a reader, a loader and a dataset."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet import fluid
from fleet.errors import ConfigurationError
from fleet.fluid import paddle

BATCHES = 4
SAMPLES = [([number % 5, number % 3], [number % 2]) for number in range(4 * BATCHES)]
"""Words of different lengths, and a label."""


pytestmark = pytest.mark.usefixtures("own_programs")


def data() -> tuple[Any, Any]:
    words = fluid.layers.data("words", [1], dtype="int64", lod_level=1)
    return words, fluid.layers.data("label", [1], dtype="int64")


def loss_of(words: Any, label: Any) -> Any:
    """Append a classifier of bags of words that a script minimizes; return its loss."""
    fluid.default_startup_program().random_seed = 7
    rows = fluid.layers.sequence_pool(fluid.layers.embedding(words, size=[5, 4]), "sum")
    predicted = fluid.layers.fc(rows, 2, act="softmax")
    loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, label))
    fluid.optimizer.SGD(learning_rate=0.5).minimize(loss)
    return loss


def started() -> fluid.Executor:
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    return executor


def values() -> dict[str, Any]:
    return {name: value.tolist() for name, value in fluid.global_scope().values.items()}


def batches() -> Any:
    return paddle.batch(lambda: iter(SAMPLES), 4)


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the last values where a script feeds what a DataFeeder makes."""
    own = fluid.program_guard(fluid.Program(), fluid.Program())
    with own, fluid.unique_name.guard(), fluid.scope_guard(fluid.core.Scope()):
        variables = data()
        loss = loss_of(*variables)
        executor, feeder = started(), fluid.DataFeeder(variables, fluid.CPUPlace())
        losses = [float(executor.run(feed=feeder.feed(batch), fetch_list=[loss])[0]) for batch in batches()()]
        return losses, values()


def test_feeds_train(expected: Any):
    losses, _ = expected
    assert len(losses) == BATCHES
    assert losses[-1] < losses[0]


def test_a_py_reader_feeds_alike(expected: Any):
    reader = fluid.layers.py_reader(
        capacity=2, shapes=[[-1, 1], [-1, 1]], dtypes=["int64", "int64"], lod_levels=[1, 0], name="train"
    )
    loss = loss_of(*fluid.layers.read_file(reader))
    reader.decorate_paddle_reader(batches())
    executor, losses = started(), []
    reader.start()
    try:
        while True:
            losses.append(float(executor.run(fetch_list=[loss.name])[0]))
    except fluid.core.EOFException:
        reader.reset()
    assert (losses, values()) == expected


@pytest.mark.parametrize("iterable", [True, False])
def test_a_loader_feeds_alike(iterable: bool, expected: Any):
    variables = data()
    loader = fluid.io.DataLoader.from_generator(feed_list=variables, capacity=2, iterable=iterable)
    loader.set_sample_list_generator(batches(), places=fluid.CPUPlace())
    loss = loss_of(*variables)
    executor, losses = started(), []
    if iterable:
        losses = [float(executor.run(feed=feed, fetch_list=[loss])[0]) for feed in loader()]
    else:
        loader.start()
        losses = [float(executor.run(fetch_list=[loss])[0]) for _ in range(BATCHES)]
        with pytest.raises(fluid.core.EOFException):
            executor.run(fetch_list=[loss])
        loader.reset()
    assert (losses, values()) == expected


def dataset_of(variables: Any, folder: Path) -> Any:
    path = folder / "part-0"
    path.write_text("".join(f"2 {words[0]} {words[1]} 1 {label[0]}\n" for words, label in SAMPLES))
    dataset = fluid.DatasetFactory().create_dataset()
    dataset.set_use_var(variables)
    dataset.set_filelist([str(path)])
    dataset.set_batch_size(4)
    dataset.set_pipe_command("cat")
    return dataset


def test_a_dataset_feeds_alike(expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    variables = data()
    loss = loss_of(*variables)
    program = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(loss_name=loss.name)
    dataset = dataset_of(variables, tmp_path)
    started().train_from_dataset(
        program, dataset, fetch_list=[loss], fetch_info=["the loss"], print_period=2, debug=False
    )
    losses, last = expected
    assert values() == last
    printed = [line.split("the loss: ") for line in capsys.readouterr().out.splitlines()]
    assert [batch for batch, _ in printed] == ["batch: 2, ", "batch: 4, "]
    np.testing.assert_allclose([float(loss.strip("[]")) for _, loss in printed], losses[1::2], rtol=1e-6)


def test_inference_from_a_dataset_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    variables = data()
    loss = loss_of(*variables)
    executor = started()
    before = values()
    executor.infer_from_dataset(
        dataset=dataset_of(variables, tmp_path), fetch_list=[loss], fetch_info=["loss"], print_period=4
    )
    assert values() == before
    assert capsys.readouterr().out.startswith("batch: 4, loss: [0.")


def test_a_handler_is_given_variables(tmp_path: Path):
    handled: list[Any] = []

    class Handler(fluid.executor.FetchHandler):
        def handler(self, res_dict: Any) -> None:
            handled.append(res_dict["the loss"].shape)

    variables = data()
    loss = loss_of(*variables)
    handler = Handler({"the loss": loss}, period_secs=0)
    started().train_from_dataset(dataset=dataset_of(variables, tmp_path), fetch_handler=handler)
    assert handled == [(1,)] * BATCHES


def test_a_scope_of_its_own_is_refused(tmp_path: Path):
    variables = data()
    loss_of(*variables)
    with pytest.raises(ConfigurationError, match="scope is"):
        started().train_from_dataset(dataset=dataset_of(variables, tmp_path), scope=fluid.core.Scope())


@pytest.mark.parametrize("trains", [False, True], ids=["computes", "trains"])
def test_fetched_sequences_have_their_lengths_if_lod_tensors_are_asked_for(trains: bool):
    words = fluid.layers.data("words", [1], dtype="int64", lod_level=2)
    rows = fluid.layers.embedding(words, size=[5, 4])
    sentences = fluid.layers.sequence_pool(rows, "sum")
    documents = fluid.layers.sequence_pool(sentences, "max")
    loss = fluid.layers.mean(documents)
    twice = fluid.layers.concat([rows, rows], axis=0)
    if trains:
        fluid.optimizer.SGD(learning_rate=0.0).minimize(loss)
    executor, fetched = started(), [rows, sentences, documents, loss, twice]
    ids, lengths = np.array([[0], [1], [2], [3], [4], [0]]), [[2, 1], [3, 1, 2]]
    feed = {"words": fluid.create_lod_tensor(ids, lengths, fluid.CPUPlace())}
    arrays = executor.run(feed=feed, fetch_list=fetched)
    tensors = executor.run(feed=feed, fetch_list=fetched, return_numpy=False)
    assert [each.recursive_sequence_lengths() for each in tensors] == [lengths, lengths[:1], [], [], []]
    assert tensors[0].lod() == [[0, 2, 3], [0, 3, 4, 6]]
    assert [np.array(each).tolist() for each in tensors] == [each.tolist() for each in arrays]
