"""The original's arguments and the short ones mean the same."""

from pathlib import Path

import pytest

from fleet.checkpoint import TrainStatus
from fleet.checkpoint.arguments import directory_of, refuse_file_system, status_of
from fleet.errors import ConfigurationError


class Runs:
    """Stands in for an executor."""

    def run(self) -> None:
        """Do nothing."""


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
    assert directory_of("save_persistables", executor, dirname, "/checkpoints") == expected


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
def test_what_is_no_directory_is_named(executor, dirname, words):
    with pytest.raises(ConfigurationError, match=rf"fleet\.save_persistables: {words}"):
        directory_of("save_persistables", executor, dirname, None)


def test_a_status_is_one_or_none():
    assert status_of("save_check_point", None) == TrainStatus()
    assert TrainStatus(4).next() == 5
    with pytest.raises(ConfigurationError, match=r"train_status is 3; expected a fleet\.TrainStatus"):
        status_of("save_check_point", 3)


def test_other_file_systems_are_refused_by_name():
    refuse_file_system("save_check_point", None)
    with pytest.raises(ConfigurationError, match=r"fs is 'hdfs'; expected None"):
        refuse_file_system("save_check_point", "hdfs")


def test_a_call_that_needs_a_directory_of_its_own_does_not_take_the_checkpoints():
    with pytest.raises(ConfigurationError, match=r"save_inference_model: .* is None; expected a path$"):
        directory_of("save_inference_model", None, None)


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
        status_of("save_check_point", status)
