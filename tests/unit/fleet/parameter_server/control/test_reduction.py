"""Numbers of all trainers, combined in the order of the trainers; and whoever gives something else."""

import itertools

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.metrics import like, numbers_of
from fleet.parameter_server.control.reduction import Contribution, Reductions

LIVE = (0, 1, 2)


def given(value: object, mode: str = "sum") -> Contribution:
    return Contribution.of(value, mode)


def result(reductions: Reductions) -> float:
    return float(np.frombuffer(reductions.result, dtype=np.float32)[0])


@pytest.mark.parametrize("order", list(itertools.permutations(LIVE)))
def test_numbers_are_summed_in_trainer_order_whatever_their_arrival(order):
    reductions = Reductions()
    values = {0: 1e8, 1: -1e8, 2: 1.0}  # any other order of summing loses the 1
    numbers = [
        reductions.contribute(trainer, 0, given(np.float32(values[trainer])), LIVE) for trainer in order
    ]
    assert numbers == [1, 1, 1]
    assert reductions.passed == 1
    assert result(reductions) == 1.0


@pytest.mark.parametrize(("mode", "expected"), [("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_each_operation(mode, expected):
    reductions = Reductions()
    for trainer, value in ((2, 1.0), (0, 3.0), (1, 2.0)):
        reductions.contribute(trainer, 0, given(np.float32(value), mode), LIVE)
    assert result(reductions) == expected


def test_who_is_missing_is_known_and_one_that_completes_is_waited_for_no_more():
    reductions = Reductions()
    reductions.contribute(1, 0, given(np.float32(2.0)), LIVE)
    assert reductions.missing(LIVE) == [0, 2]
    reductions.release((1, 2))
    assert reductions.passed == 0
    reductions.contribute(2, 0, given(np.float32(2.0)), (1, 2))
    assert reductions.passed == 1


def test_asking_again_for_a_result_that_is_there_gives_nothing_to_the_next_one():
    reductions = Reductions()
    for trainer in LIVE:
        reductions.contribute(trainer, 0, given(np.float32(1.0)), LIVE)
    assert reductions.contribute(0, 0, given(np.float32(1.0)), LIVE) == 1
    assert reductions.missing(LIVE) == [0, 1, 2]
    assert reductions.contribute(0, 1, given(np.float32(1.0)), LIVE) == 2


def test_a_restarted_trainer_takes_part_in_the_next_reduction():
    reductions = Reductions()
    for trainer in LIVE:
        reductions.contribute(trainer, 0, given(np.float32(1.0)), LIVE)
    reductions.contribute(2, 1, given(np.float32(5.0)), LIVE)
    reductions.admit(2)
    assert reductions.missing(LIVE) == [0, 1, 2]
    assert reductions.contribute(2, 0, given(np.float32(1.0)), LIVE) == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(given(np.ones(2, np.float32)), r"sum of <f4\[2\]", id="shape"),
        pytest.param(given(np.float64(1)), r"sum of <f8\[\]", id="type"),
        pytest.param(given(np.float32(1), "max"), r"max of <f4\[\]", id="operation"),
    ],
)
def test_another_call_on_another_trainer_is_named(other, words):
    reductions = Reductions()
    reductions.contribute(0, 0, given(np.float32(1)), LIVE)
    with pytest.raises(ConfigurationError, match=rf"trainer 1 requests the {words}, and trainer 0"):
        reductions.contribute(1, 0, other, LIVE)


@pytest.mark.parametrize(
    ("value", "mode", "words"),
    [
        pytest.param(1, "mean", "mode is 'mean'; expected sum, min, max", id="operation"),
        pytest.param("text", "sum", "expected numbers", id="text"),
        pytest.param(np.zeros(1 << 22), "sum", "at most 16777216 bytes", id="large"),
        pytest.param(torch.ones(1, dtype=torch.bfloat16), "sum", "convert it", id="bfloat16"),
    ],
)
def test_what_cannot_be_combined_is_refused(value, mode, words):
    with pytest.raises(ConfigurationError, match=words):
        given(value, mode)


def test_the_result_has_the_form_of_what_was_given():
    assert numbers_of(True).dtype == np.int64
    output = np.zeros(2)
    assert torch.equal(like(torch.ones(2), np.ones(2) * 3, output), torch.tensor([3.0, 3.0]).double())
    assert output.tolist() == [3.0, 3.0]
    assert like(1, np.array(3), None) == 3


@pytest.mark.parametrize("shape", [(3,), (2, 2), (-2,), ()])
def test_what_does_not_fill_its_shape_is_refused_before_it_keeps_others_waiting(shape):
    reductions = Reductions()
    with pytest.raises(ConfigurationError, match=r"8 bytes arrived for the sum of <f4.*, expected -?[0-9]+$"):
        reductions.contribute(0, 0, Contribution("sum", "<f4", shape, bytes(8)), LIVE)
    assert reductions.missing(LIVE) == [0, 1, 2]
