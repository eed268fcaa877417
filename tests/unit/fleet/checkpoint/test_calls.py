"""The public calls: the original's arguments and the short forms mean the same."""

from pathlib import Path
from typing import Any, cast

import pytest

from fleet.checkpoint import Savable, SavingCalls, TrainStatus
from fleet.errors import CheckpointError, ConfigurationError
from fleet.fluid import Program


class Runs:
    """Stands in for an executor."""

    def run(self) -> None:
        """Do nothing."""


class Calls(SavingCalls):
    """Records what a training is asked for."""

    def __init__(self, root: str | None = None) -> None:
        self.made: list[Any] = []
        self._root = root

    def _checkpoint_root(self) -> str | None:
        return self._root

    def _training(self, program: Program | None) -> Savable:
        return cast("Savable", self)

    def is_first_worker(self) -> bool:
        return True

    def save(self, directory: str, status: TrainStatus) -> None:
        self.made.append((directory, status))

    def save_numbered(self, folder: str, status: TrainStatus, **options: Any) -> int:
        self.made.append((folder, status, options))
        return 0

    def load(self, directory: str) -> None:
        self.made.append(directory)


@pytest.mark.parametrize(
    ("executor", "dirname", "expected"),
    [
        pytest.param(Runs(), "d", "d", id="the-originals"),
        pytest.param(None, "d", "d", id="no-executor"),
        pytest.param("d", None, "d", id="short"),
        pytest.param(Path("d/e"), None, "d/e", id="a-path"),
        pytest.param(None, None, "/checkpoints", id="the-default"),
    ],
)
def test_the_directory_is_found(executor, dirname, expected):
    calls = Calls("/checkpoints")
    calls.save_persistables(executor, dirname, state={"a": 1})
    assert calls.made == [(expected, TrainStatus(state={"a": 1}))]


@pytest.mark.parametrize(
    ("executor", "dirname", "words"),
    [
        pytest.param("a", "b", r"the executor is 'a'", id="two-directories"),
        pytest.param(3, "b", r"the executor is 3; expected a fleet\.Executor", id="no-executor"),
        pytest.param(None, 3, r"the directory is 3; expected a path", id="no-path"),
        pytest.param(
            None, None, r"the directory is None; expected a path, or FLEET_CHECKPOINT_DIR", id="nowhere"
        ),
    ],
)
def test_what_is_not_a_directory_is_named(executor, dirname, words):
    with pytest.raises(ConfigurationError, match=rf"fleet\.save_persistables: {words}"):
        Calls().save_persistables(executor, dirname)


def test_a_status_is_optional_and_comes_first_in_the_short_form():
    calls = Calls("/checkpoints")
    calls.save_check_point()
    calls.save_check_point(None, TrainStatus(4), remain_all_checkpoint=False, incremental=True)
    assert calls.made == [
        ("/checkpoints", TrainStatus(), {"keep": 0, "incremental": False}),
        ("/checkpoints", TrainStatus(4), {"keep": 1, "incremental": True}),
    ]
    assert TrainStatus(4).next() == 5
    with pytest.raises(ConfigurationError, match=r"train_status is 3; expected a fleet\.TrainStatus"):
        calls.save_check_point("d", None, cast("Any", 3))


def test_a_folder_without_a_checkpoint_is_an_error_only_where_it_is_asked_for():
    calls = Calls()
    assert calls.load_check_point("d") == TrainStatus()
    for load in (calls.load_persistables, lambda path: calls.load_check_point(path, ignore_empty=False)):
        with pytest.raises(CheckpointError, match="d has no checkpoint"):
            load("d")


@pytest.mark.parametrize("call", ["save_check_point", "load_check_point"])
def test_other_file_systems_are_refused_by_name(call):
    with pytest.raises(ConfigurationError, match=rf"fleet\.{call}: fs is 'hdfs'; expected None"):
        getattr(Calls(), call)("d", fs="hdfs")


def test_a_model_for_serving_needs_a_directory_of_its_own():
    with pytest.raises(ConfigurationError, match=r"save_inference_model: .* is None; expected a path$"):
        Calls("/checkpoints").save_inference_model()


@pytest.mark.parametrize("count", [0, True, "2"])
def test_the_number_of_checkpoints_to_keep_is_positive(count):
    with pytest.raises(ConfigurationError, match="expected a whole number of at least 1"):
        Calls().clean_redundant_check_points("d", checkpoint_num=count)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param(TrainStatus("3"), "epoch_no is '3'; expected a whole number from -1", id="text"),  # type: ignore[arg-type]
        pytest.param(TrainStatus(-2), "epoch_no is -2", id="below"),
        pytest.param(TrainStatus(step=2**63), "step is 9223372036854775808", id="above"),
        pytest.param(TrainStatus(state=[1]), r"state is \[1\]; expected an object", id="no-mapping"),  # type: ignore[arg-type]
    ],
)
def test_a_status_that_could_not_be_read_again_is_refused_before_it_is_saved(status, words):
    with pytest.raises(ConfigurationError, match=rf"fleet\.save_check_point: {words}"):
        Calls().save_check_point("d", status)
