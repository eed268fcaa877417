"""What a strategy says of how trainers average."""

import pytest

from fleet import ConfigurationError, LocalSGD, PowerSGD


def test_when_parameters_are_averaged():
    plan = LocalSGD(k_steps=4, begin_step=3)
    assert [step for step in range(1, 13) if plan.is_due(step)] == [1, 2, 4, 8, 12]
    assert all(LocalSGD().is_due(step) for step in range(1, 5))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(k_steps=0), "LocalSGD.k_steps is 0; expected a whole number of at least 1"),
        (lambda: LocalSGD(begin_step=True), "LocalSGD.begin_step is True"),
        (lambda: PowerSGD(matrix_rank=0), "PowerSGD.matrix_rank is 0"),
        (lambda: PowerSGD(start_step=1), "PowerSGD.start_step is 1; expected a whole number of at least 2"),
    ],
)
def test_numbers_that_say_nothing_are_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
