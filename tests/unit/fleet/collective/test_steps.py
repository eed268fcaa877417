"""How trainers compare their steps, and which one an error names."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleet.collective.steps import (
    Account,
    Steps,
    after_steps,
    difference,
    hyper_parameters,
)
from fleet.collective.world import World
from fleet.errors import ConfigurationError


def account(*steps: tuple[int, float], missing: int = 0) -> Account:
    """Return the account of a trainer with steps after so many averages, with such learning rates."""
    made = Steps(cast("Any", None))
    for made.number in range(missing):
        made.record([{"lr": 1.0}])
    for made.number, lr in steps:
        made.record([{"lr": lr, "betas": [0.9, 0.999]}])
    return Account.from_text(made.account.to_text())


USUAL = ((1, 0.1), (2, 0.1), (3, 0.1))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        pytest.param(
            ((1, 0.1), (2, 0.2), (3, 0.2)),
            "stepped with lr=0.2 in param group 0 after the average of step 1's gradients where this "
            "trainer, 0, stepped with lr=0.1; expected the same on every trainer",
            id="the-first-step-with-another-learning-rate",
        ),
        pytest.param(
            ((1, 0.1), (3, 0.1)),
            "made no optimizer.step.. after the average of step 1's gradients where this trainer, 0, made",
            id="a-step-skipped",
        ),
        pytest.param(
            ((1, 0.1), (2, 0.1), (3, 0.1), (3, 0.1)),
            "made 2 optimizer.step..s after the average of step 2's gradients where",
            id="a-step-twice",
        ),
        pytest.param(
            ((0, 0.1), *USUAL), "made one optimizer.step.. before any gradients were", id="too-early"
        ),
    ],
)
def test_a_trainer_that_steps_otherwise_is_named_with_the_first_difference(theirs, words):
    rank, clause = difference({0: account(*USUAL), 1: account(*USUAL), 2: account(*theirs)}, 0) or (0, "")
    assert rank == 2
    assert re.match(words, clause), clause


def test_equal_accounts_have_no_difference():
    assert difference({rank: account(*USUAL) for rank in range(3)}, 1) is None


def test_an_old_difference_is_reported_by_counts():
    since = [(averages, 0.1) for averages in range(50, 90)]
    longer, shorter = account(*since, missing=5), account(*since, missing=4)
    rank, clause = difference({0: longer, 1: shorter}, 0) or (0, "")
    assert rank == 1
    said = "has made or skipped 44 steps, which differ from those of this trainer, 0"
    assert clause.startswith(said)


def test_hyper_parameters_are_the_options_that_change_a_step():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([{"params": [parameter], "name": "of rank 1"}], lr=torch.tensor(0.5))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (options,) = hyper_parameters(optimizer)
    assert (options["lr"], options["betas"]) == (0.5, [0.9, 0.999])
    assert not {"name", "initial_lr", "fused", "foreach", "params"} & options.keys()
    optimizer.param_groups[0]["lr"] = 0.5 * (1 + 1e-15)  # another processor's cosine
    assert hyper_parameters(optimizer) == [options]


def test_steps_of_local_sgd_are_counted_by_steps():
    usual, left_out = Steps(cast("Any", None)), Steps(cast("Any", None))
    for usual.number in range(3):
        left_out.number = usual.number
        usual.record([{"lr": 0.1}])
        left_out.record([{"lr": 0.1 * (1 + (usual.number == 2))}])
    rank, clause = difference({0: usual.account, 1: left_out.account}, 0, after_steps) or (0, "")
    assert (rank, clause.partition(";")[0]) == (
        1,
        "stepped with lr=0.2 in param group 0 after 2 steps where this trainer, 0, stepped with lr=0.1",
    )
    left_out.number = 1
    left_out.record(None)
    rank, clause = difference({0: usual.account, 1: left_out.account}, 0, after_steps) or (0, "")
    assert clause.startswith(
        "cleared the gradients of one backward pass without a step after 1 step where this "
        "trainer, 0, cleared those of no backward pass; expected the same steps on every trainer"
    )


def test_compare_names_a_trainer_that_has_stepped_otherwise():
    texts: list[str] = []
    group = SimpleNamespace(world=World(0, 2, "m", 1), agree=lambda *_: dict(enumerate(texts)))
    ours, theirs = (Steps(cast("Any", group)) for _ in range(2))
    for steps, rate in ((ours, 0.1), (theirs, 0.2)):
        steps.number = 1
        steps.record([{"lr": rate}])
        texts.append(steps.account.to_text())
    assert ours.digest != theirs.digest
    with pytest.raises(ConfigurationError, match=r"trainer 1 stepped with lr=0.2 in param group 0"):
        ours.compare("steps")
