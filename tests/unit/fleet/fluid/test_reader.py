"""Loaders: batches ahead of the steps, between start and reset, and the errors of a script's generator."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigurationError
from fleet.fluid import layers, unique_name
from fleet.fluid.lod import LoDTensor
from fleet.fluid.paddle import batch
from fleet.fluid.program import Program, default_main_program, program_guard
from fleet.fluid.reader import DataLoader, EOFException, GeneratorLoader, PyReader, read_feed


@pytest.fixture(autouse=True)
def program() -> Iterator[Program]:
    """Give each test its own program."""
    own = Program()
    with program_guard(own, Program()), unique_name.guard():
        yield own


def samples() -> Iterator[tuple[Any, ...]]:
    return ((np.full(2, number), number) for number in range(5))


def variables() -> list[Any]:
    return [layers.data("x", [2]), layers.data("y", [1], dtype="int64")]


def labels_in(feeds: Any) -> list[list[int]]:
    return [np.array(feed["y"]).reshape(-1).tolist() for feed in feeds]


def test_an_iterable_loader_yields_feeds_for_one_device():
    loader = DataLoader.from_generator(feed_list=variables(), capacity=2)
    loader.set_sample_generator(samples, batch_size=2, drop_last=False, places=None)
    for _ in range(2):  # each iteration begins again
        batches = [feed for (feed,) in loader()]
        assert labels_in(batches) == [[0, 1], [2, 3], [4]]
    assert np.array(batches[0]["x"]).dtype == np.float32
    assert np.array(batches[0]["x"]).tolist() == [[0, 0], [1, 1]]


def test_a_last_batch_can_be_left_out():
    loader = DataLoader.from_generator(feed_list=variables(), capacity=2).set_sample_generator(samples, 2)
    assert labels_in(feed for (feed,) in loader()) == [[0, 1], [2, 3]]


def test_batches_can_be_lists_of_samples_or_arrays():
    loader = DataLoader.from_generator(feed_list=variables(), capacity=2, return_list=True)
    loader.set_sample_list_generator(batch(samples, 3))
    assert [np.array(y).reshape(-1).tolist() for ((_, y),) in loader()] == [[0, 1, 2], [3, 4]]
    whole = [np.zeros((2, 2), np.float32), LoDTensor(np.ones((2, 1), np.int64), [[2]])]
    loader.set_batch_generator(lambda: iter([whole, {"x": whole[0], "y": whole[1]}]))
    for (found,) in loader():
        assert found[0].tolist() == [[0, 0], [0, 0]]
        assert found[1].recursive_sequence_lengths() == [[2]]


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        pytest.param([np.zeros(1)], "1 arrays; expected 2, of x, y", id="too-few"),
        pytest.param(
            {"x": np.zeros(1), "z": np.zeros(1)}, "a batch has x, z; expected x, y", id="other-names"
        ),
    ],
)
def test_a_batch_of_other_variables_is_refused(wrong: Any, found: str):
    loader = DataLoader.from_generator(feed_list=variables(), capacity=2)
    loader.set_batch_generator(lambda: iter([wrong]))
    with pytest.raises(ConfigurationError, match=found):
        list(loader())


def reading(program: Program) -> tuple[GeneratorLoader, Any]:
    """Return a loader of the program and the variables that it reads."""
    loader = layers.py_reader(
        capacity=2, shapes=[[-1, 2], [-1, 1]], dtypes=["float32", "int64"], lod_levels=[0, 1], name="train"
    )
    return loader, layers.read_file(loader)


def test_a_program_reads_between_start_and_reset(program: Program):
    loader, (x, y) = reading(program)
    assert [(each.name, each.shape, each.lod_level) for each in (x, y)] == [
        ("read_file_0.tmp_0", (-1, 2), 0),
        ("read_file_0.tmp_1", (-1, 1), 1),
    ]
    (op,) = program.global_block().ops
    assert (op.type, op.input("Reader"), op.output("Out")) == ("read", ["train_reader"], [x.name, y.name])
    loader.decorate_paddle_reader(batch(lambda: iter([([1, 2], [7, 8]), ([3, 4], [9])]), 2))
    for _ in range(2):
        loader.start()
        feed = read_feed(program)
        assert np.array(feed[x.name]).tolist() == [[1, 2], [3, 4]]
        labels = feed[y.name]
        assert isinstance(labels, LoDTensor)
        assert labels.recursive_sequence_lengths() == [[2, 1]]
        with pytest.raises(EOFException, match=r"train_reader has no more batches; call its reset\(\)"):
            read_feed(program)
        loader.reset()


def test_the_error_of_a_generator_is_that_of_the_run_without_its_batch(program: Program):
    def broken() -> Iterator[Any]:
        yield [np.zeros((1, 2)), np.zeros((1, 1))]
        raise OSError("the disk is gone")

    loader, _ = reading(program)
    loader.decorate_tensor_provider(broken)
    loader.start()
    read_feed(program)
    with pytest.raises(OSError, match="the disk is gone"):
        read_feed(program)


def test_a_reset_within_an_epoch_ends_the_thread(program: Program):
    loader, _ = reading(program)
    endless = [np.zeros((1, 2)), np.zeros((1, 1))]
    loader.decorate_batch_generator(lambda: iter(lambda: endless, None))
    loader.start()
    read_feed(program)
    loader.reset()
    assert "the loader train_reader" not in [each.name for each in threading.enumerate()]
    loader.start()
    assert len(read_feed(program)) == 2
    loader.reset()


def test_data_give_a_reader_their_shapes(program: Program):
    reader = layers.create_py_reader_by_data(capacity=4, feed_list=variables(), name="by_data")
    x, y = layers.read_file(layers.double_buffer(reader))
    assert [(each.shape, each.dtype) for each in (x, y)] == [((-1, 2), "float32"), ((-1, 1), "int64")]
    single = layers.create_py_reader_by_data(capacity=4, feed_list=[layers.data("z", [1])])
    assert layers.read_file(single).shape == (-1, 1)


@pytest.mark.parametrize("make", [DataLoader.from_generator, PyReader], ids=["DataLoader", "PyReader"])
def test_a_loader_that_is_not_iterable_reads_the_data_themselves(make: Any, program: Program):
    loader = make(feed_list=variables(), capacity=2, iterable=False)
    loader.decorate_sample_list_generator(batch(samples, 5))
    loader.start()
    assert labels_in([read_feed(program)]) == [[0, 1, 2, 3, 4]]
    loader.reset()


@pytest.mark.parametrize(
    ("do", "found"),
    [
        pytest.param(
            lambda _, program: read_feed(program), r"not started; call its start\(\)", id="no-start"
        ),
        pytest.param(lambda loader, _: loader.start(), "has no generator", id="no-generator"),
        pytest.param(
            lambda loader, _: list(loader()), r"iterable is False; expected start\(\)", id="iteration"
        ),
        pytest.param(
            lambda loader, _: [loader.set_batch_generator(list).start(), loader.start()],
            r"start\(\) was called a second time",
            id="two-starts",
        ),
    ],
)
def test_calls_out_of_order_are_refused(do: Any, found: str, program: Program):
    loader, _ = reading(program)
    with pytest.raises(ConfigurationError, match=found):
        do(loader, program)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        pytest.param({"capacity": 2}, "has no feed_list", id="no-variables"),
        pytest.param({"feed_list": ["x"]}, "capacity is 0", id="no-capacity"),
    ],
)
def test_arguments_that_are_missing_are_named(arguments: Any, found: str):
    with pytest.raises(ConfigurationError, match=found):
        DataLoader.from_generator(**arguments)


def test_shapes_dtypes_and_levels_are_as_many():
    with pytest.raises(ConfigurationError, match="1 shapes, 2 dtypes and 1 lod_levels"):
        layers.py_reader(2, [[-1, 1]], ["int64", "int64"])


def test_an_iterable_loader_has_no_start():
    loader = DataLoader.from_generator(feed_list=variables(), capacity=2)
    with pytest.raises(ConfigurationError, match=r"start\(\) of a loader whose iterable is True"):
        loader.start()


def test_programs_built_under_guards_of_names_read_from_their_own_loaders():
    built = []
    for number in range(2):
        with program_guard(Program(), Program()), unique_name.guard():
            loader = DataLoader.from_generator(feed_list=variables(), capacity=2, iterable=False)
            whole = [np.full((1, 2), number, np.float32), np.full((1, 1), number)]
            loader.set_batch_generator(partial(iter, [whole]))
            built.append((default_main_program(), loader))
    for _, loader in built:
        loader.start()
    assert labels_in(read_feed(program) for program, _ in built) == [[0], [1]]


def test_a_program_from_a_file_says_that_it_has_no_loader(program: Program):
    DataLoader.from_generator(feed_list=variables(), capacity=2, iterable=False)
    found = Program.from_json(program.to_json().replace("create_py_reader_", "elsewhere_"))
    with pytest.raises(ConfigurationError, match="which this process has not created; give feed"):
        read_feed(found)
