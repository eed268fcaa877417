"""How many GPUs the workers of a node will see."""

import pytest

from fleet.errors import ConfigurationError
from fleet.launch import collective


@pytest.mark.parametrize(
    ("environ", "has_device", "count"),
    [
        pytest.param({}, True, 4, id="torch-counts-them"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43,MIG-1"}, True, 4, id="whatever-their-names"),
        pytest.param({}, False, 0, id="no-driver"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, True, 0, id="all-hidden"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, True, 0, id="all-hidden-by-a-number"),
    ],
)
def test_visible_gpus(monkeypatch, environ, has_device, count):
    monkeypatch.setattr(collective, "has_device_files", lambda: has_device)
    monkeypatch.setattr(collective, "_COUNT_GPUS", "print(4)")
    assert collective.visible_gpus(environ) == count


@pytest.mark.parametrize(
    ("name", "found"),
    [("nvidia0", True), ("dxg", True), ("kfd", True), ("nvidiactl", False), ("nvidia-uvm", False)],
)
def test_a_driver_shows_in_the_devices(tmp_path, name, found):
    (tmp_path / name).touch()
    assert collective.has_device_files(tmp_path) is found


@pytest.mark.parametrize(
    ("question", "words"),
    [
        pytest.param("raise SystemExit('no torch here')", "no torch here", id="an-error"),
        pytest.param("print('many')", "invalid literal", id="no-number"),
    ],
)
def test_a_count_that_fails_says_how_to_do_without(monkeypatch, question, words):
    monkeypatch.setattr(collective, "has_device_files", lambda: True)
    monkeypatch.setattr(collective, "_COUNT_GPUS", question)
    with pytest.raises(ConfigurationError, match=f"how many GPUs this node has: {words}.*--worker_num"):
        collective.visible_gpus({})


def test_the_answer_is_given_in_the_workers_environment(monkeypatch):
    monkeypatch.setattr(collective, "has_device_files", lambda: True)
    monkeypatch.setattr(collective, "_COUNT_GPUS", "import os; print(len(os.getenv('CUDA_VISIBLE_DEVICES')))")
    assert collective.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 3
