"""Datasets: files through a command into batches, and the loop that trains on them."""

import os
import random
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import ConfigurationError, FleetError
from fleet.fluid.dataset import DatasetFactory, FetchHandler, InMemoryDataset, QueueDataset, run_from_dataset
from fleet.fluid.lod import LoDTensor
from tests.support.fluid import data

WORDS, LABEL = data("words", [1], "int64", lod_level=1), data("label", [1], "int64")


def files_of(folder: Path, *texts: str) -> list[str]:
    paths = [folder / f"part-{number}" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def dataset_of(files: list[str], kind: str = "QueueDataset", variables: Any = (WORDS, LABEL)) -> Any:
    dataset = DatasetFactory().create_dataset(kind)
    dataset.set_use_var(variables)
    dataset.set_filelist(files)
    return dataset


def labels_in(batches: Any) -> list[list[int]]:
    return [np.array(feed["label"]).reshape(-1).tolist() for feed in batches]


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_lines_become_sequences_and_dense_values(kind: str, tmp_path: Path):
    image = data("image", [1, 2])
    files = files_of(tmp_path, "2 11 12 1 0 2 0.5 1\n1 13 1 1 2 2 3\n", "3 7 8 9 1 2 2 4 5\n")
    dataset = dataset_of(files, kind, [WORDS, LABEL, image])
    dataset.set_batch_size(2)
    if isinstance(dataset, InMemoryDataset):
        dataset.load_into_memory()
    first, second = dataset.batches()
    assert isinstance(first["words"], LoDTensor)
    assert first["words"].values.tolist() == [[11], [12], [13]]
    assert first["words"].lengths == ((2, 1),)
    assert np.array(first["image"]).tolist() == [[[0.5, 1]], [[2, 3]]]
    assert np.array(first["image"]).dtype == np.float32
    assert labels_in([first, second]) == [[0, 1], [2]]


def test_the_command_reads_the_file(tmp_path: Path):
    generator = tmp_path / "generator.py"
    generator.write_text(
        "from fleet.fluid.incubate import data_generator\n"
        "class Numbers(data_generator.MultiSlotDataGenerator):\n"
        "    def generate_sample(self, line):\n"
        "        def samples():\n"
        "            numbers = [int(word) for word in line.split(',')]\n"
        "            yield [('words', numbers), ('label', [sum(numbers)])]\n"
        "        return samples\n"
        "Numbers().run_from_stdin()\n"
    )
    dataset = dataset_of(files_of(tmp_path, "1,2,3\n40,2\n"))
    dataset.set_pipe_command(f"{sys.executable} {generator}")
    dataset.set_batch_size(8)
    (batch,) = dataset.batches()
    assert np.array(batch["words"]).reshape(-1).tolist() == [1, 2, 3, 40, 2]
    assert labels_in([batch]) == [[6, 42]]


def test_a_failed_command_is_an_error_with_its_last_words(tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, ""))
    dataset.set_pipe_command("echo 1 5 1 0; echo what went wrong >&2; exit 3")
    batches = dataset.batches()
    assert labels_in([next(batches)]) == [[0]]
    with pytest.raises(FleetError, match=r"ended with exit code 3 on .*part-0.*stderr ends: what went wrong"):
        next(batches)


def test_the_end_of_a_command_explains_a_cut_line(tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, ""))
    dataset.set_pipe_command("printf '2 5'; kill -9 $$")
    with pytest.raises(FleetError, match="ended with signal 9"):
        list(dataset.batches())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        pytest.param("1 5", "", id="too-few-slots"),
        pytest.param("2 5 1 1", "", id="a-count-too-high"),
        pytest.param("1 5 1 0 9", "1 more words", id="words-left"),
        pytest.param("0 1 0", "0 values of words, not one or more", id="no-values"),
        pytest.param("1 5 2 0 1", "2 values of label, not 1", id="a-dense-variable-too-long"),
        pytest.param("1 x 1 0", "'x'", id="no-number"),
    ],
)
def test_a_malformed_line_is_named(line: str, found: str, tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, f"1 5 1 0\n{line}\n"))
    with pytest.raises(
        ConfigurationError, match=f"part-0: line 2 of the output of 'cat' is '{line}'.*{found}"
    ):
        list(dataset.batches())


def test_ids_of_64_bits_keep_their_bits(tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, f"1 {2**64 - 2} 1 0\n"))
    assert np.array(next(dataset.batches())["words"]).tolist() == [[-2]]


def test_threads_alternate_and_each_batches_its_own_files(tmp_path: Path):
    lines = ["".join(f"1 0 1 {10 * file + line}\n" for line in range(3)) for file in range(4)]
    dataset = dataset_of(files_of(tmp_path, *lines))
    dataset.set_batch_size(2)
    dataset.set_thread(2)
    expected = [[0, 1], [10, 11], [2, 20], [12, 30], [21, 22], [31, 32]]
    assert labels_in(dataset.batches()) == expected
    assert labels_in(dataset.batches(threads=1))[:2] == [[0, 1], [2, 10]]


def test_a_reader_that_stops_ends_its_commands(tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, ""))
    dataset.set_pipe_command(f"echo $$ > {tmp_path}/pid; while true; do echo 1 5 1 0; done")
    batches = dataset.batches()
    next(batches)
    batches.close()
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "the dataset" not in [each.name for each in threading.enumerate()]


def test_samples_in_memory_are_shuffled_by_the_module_random(tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, "".join(f"1 0 1 {n}\n" for n in range(10))), "InMemoryDataset")
    dataset.set_batch_size(10)
    dataset.load_into_memory()
    assert dataset.get_memory_data_size() == dataset.get_shuffle_data_size() == 10
    order = list(range(10))
    random.seed(1)
    dataset.local_shuffle()
    random.seed(1)
    random.shuffle(order)
    assert labels_in(dataset.batches()) == [order]
    dataset.global_shuffle()
    assert sorted(labels_in(dataset.batches())[0]) == list(range(10))
    dataset.release_memory()
    with pytest.raises(ConfigurationError, match=r"load_into_memory\(\) first"):
        dataset.batches()


def fetch_nothing(feed: Mapping[str, Any], fetched: list[Any]) -> list[Any]:
    return []


class Trainers:
    """The `fleet` of one of two trainers, as far as datasets ask it."""

    def worker_num(self) -> int:
        return 2

    def all_reduce_worker(self, values: Any, output: Any) -> None:
        output[:] = values + 5


def test_trainers_add_up_their_samples_and_exchange_none(tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, "1 0 1 0\n"), "InMemoryDataset")
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert dataset.get_memory_data_size(Trainers()) == 6
    with pytest.raises(
        ConfigurationError, match=r"there are 2; expected a list of files .* fleet\.split_files"
    ):
        dataset.global_shuffle(Trainers())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(lambda d: d.set_filelist([]), "expected set_filelist", id="no-files"),
        pytest.param(lambda d: d.set_use_var([]), "expected set_use_var", id="no-variables"),
        pytest.param(
            lambda d: d.set_filelist(["gone"]), "names gone, which is not a file", id="a-missing-file"
        ),
        pytest.param(lambda d: d.set_batch_size(0), "set_batch_size: the number is 0", id="batch-size"),
        pytest.param(lambda d: d.set_use_var([data("x", [1], "float64")]), "x is float64", id="dtype"),
        pytest.param(lambda d: d.local_shuffle(), "InMemoryDataset", id="shuffle-of-a-queue"),
        pytest.param(lambda d: d.global_shuffle(), "InMemoryDataset", id="global-shuffle-of-a-queue"),
    ],
)
def test_what_cannot_be_read_is_refused(change: Any, found: str, tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, "1 0 1 0\n"))
    with pytest.raises(ConfigurationError, match=found):
        list(change(dataset) or dataset.batches())


def test_classes_are_named():
    assert type(DatasetFactory().create_dataset()) is QueueDataset
    with pytest.raises(ConfigurationError, match="'BoxPSDataset'; expected QueueDataset or InMemoryDataset"):
        DatasetFactory().create_dataset("BoxPSDataset")


def test_every_batch_is_run_and_some_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dataset = dataset_of(files_of(tmp_path, "".join(f"1 0 1 {n}\n" for n in range(5))))
    seen: list[tuple[list[int], list[Any]]] = []

    def run(feed: Mapping[str, Any], fetched: list[Any]) -> list[Any]:
        seen.append((np.array(feed["label"]).reshape(-1).tolist(), fetched))
        return [np.array([0.25])] * len(fetched)

    run_from_dataset(run, dataset, fetch_list=["loss"], fetch_info=["the loss"], print_period=2)
    assert [labels for labels, _ in seen] == [[0], [1], [2], [3], [4]]
    assert [fetched for _, fetched in seen] == [[], ["loss"], [], ["loss"], []]
    assert capsys.readouterr().out == "batch: 2, the loss: [0.25]\nbatch: 4, the loss: [0.25]\n"


def test_a_handler_is_given_values_once_in_its_period(tmp_path: Path):
    handled: list[Mapping[str, Any]] = []

    class Handler(FetchHandler):
        def handler(self, res_dict: Mapping[str, Any]) -> None:
            handled.append(res_dict)

    dataset = dataset_of(files_of(tmp_path, "1 0 1 0\n" * 6))
    times = iter(range(100))
    run_from_dataset(
        lambda _, fetched: [f"value of {each}" for each in fetched],
        dataset,
        fetch_list=["loss"],
        print_period=1,
        fetch_handler=Handler({"rate": "lr"}, period_secs=2),
        clock=lambda: float(next(times)),
    )
    assert handled == [{"rate": "value of lr"}] * 3


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        pytest.param({"fetch_list": ["a"], "fetch_info": []}, "0 texts, but fetch_list has 1", id="infos"),
        pytest.param({"print_period": 0}, "print_period: the number is 0", id="period"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: Any, found: str, tmp_path: Path):
    dataset = dataset_of(files_of(tmp_path, "1 0 1 0\n"))
    with pytest.raises(ConfigurationError, match=found):
        run_from_dataset(fetch_nothing, dataset, **arguments)
    with pytest.raises(ConfigurationError, match=r"that fluid\.DatasetFactory"):
        run_from_dataset(fetch_nothing, [])  # type: ignore[arg-type]
