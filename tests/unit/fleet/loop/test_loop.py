"""Loops that begin in the middle: the same batches, in the same order, at the same learning rates."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fleet
from fleet.errors import ConfigurationError
from fleet.loop import LoopCalls, Loops, Place
from fleet.process import progress

EPOCHS = 3
SAMPLES = 23
BATCH = 4


class Training(LoopCalls):
    """Counts steps, as a session does."""

    def __init__(self, made: int = 0) -> None:
        self.made = made

    def _steps_made(self) -> int:
        return self.made


class Numbers(IterableDataset[torch.Tensor]):
    """Numbers that come in another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(SAMPLES).roll(self.epoch)


class Entered(DataLoader[Any]):
    """A loader with an iteration of its own."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


DATA = TensorDataset(torch.arange(SAMPLES))
LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, BATCH, shuffle=True),
    "with-a-generator-of-its-own": lambda: DataLoader(
        DATA, BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "in-order": lambda: DataLoader(DATA, BATCH),
    "weighted": lambda: DataLoader(DATA, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "shared-out": lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 2, 1)),
    "without-batches": lambda: DataLoader(DATA, batch_size=None, sampler=RandomSampler(DATA)),
    "of-a-class-of-the-script": lambda: Entered(DATA, BATCH, shuffle=True),
    "without-a-length": lambda: DataLoader(Numbers(), BATCH),
    "a-list": lambda: [torch.tensor([number]) for number in range(7)],
}


def seen(made: int, loader: Iterable[Any], per_step: int) -> list[tuple[int, int, list[Any], str]]:
    """Train on what is left; return step, epoch, samples and learning rate of each batch of a step."""
    training = Training(made)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    by_epoch, by_step = lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 3, 0.7)
    found = []
    loop = training.epochs(EPOCHS, loader, by_epoch, step_scheduler=by_step, batches_per_step=per_step)
    for epoch, batches in loop:
        together = []
        for batch in batches:
            samples = batch[0].tolist() if isinstance(batch, list) else batch.tolist()
            together.append((training.made, epoch, samples, optimizer.param_groups[0]["lr"].hex()))
            if len(together) == per_step:
                found += together
                together = []
                optimizer.step()
                training.made += 1
                by_step.step()
        by_epoch.step()
    return found


@pytest.mark.parametrize("per_step", [1, 2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loop_that_begins_at_any_step_sees_what_the_whole_one_sees_from_there(kind, per_step):
    whole = seen(0, LOADERS[kind](), per_step)
    steps = whole[-1][0] + 1
    assert len(whole) == steps * per_step > per_step
    for made in range(steps + 2):
        assert seen(made, LOADERS[kind](), per_step) == [row for row in whole if row[0] >= made], made


def test_epochs_are_shuffled_each_in_its_own_way_whatever_the_seed_of_the_process():
    def orders(process: int, **arguments: int) -> list[list[int]]:
        torch.manual_seed(process)
        loop = Training().epochs(2, DataLoader(DATA, BATCH, shuffle=True), **arguments)
        return [[number for (batch,) in batches for number in batch.tolist()] for _, batches in loop]

    first, second = orders(0)
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    assert orders(1) == [first, second]
    assert orders(0, seed=5)[0] not in (first, second)


def test_what_is_left_is_entered_without_loading_what_comes_before():
    asked: list[int] = []

    class Dear(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    ((_, batches),) = Training(2).epochs(1, DataLoader(Dear(), BATCH))
    assert [batch.tolist() for batch in batches] == [[8, 9, 10, 11]] == [asked]


def test_what_is_left_of_an_epoch_is_like_its_loader_in_all_else():
    loader = DataLoader(DATA, BATCH)
    loop = Training(2).epochs(1, loader)
    _, batches = next(loop)
    assert len(batches) == len(loader) == 6
    assert batches.dataset is DATA
    assert batches.batch_size == BATCH


def test_a_second_look_before_the_first_step_sees_the_rest_and_after_it_everything():
    training = Training(4)
    for _, batches in training.epochs(1, DataLoader(DATA, BATCH)):
        assert len(list(batches)) == 2  # a look at the data
        for _ in batches:
            training.made += 1
        assert len(list(batches)) == 6  # an evaluation on what was trained on
    assert training.made == 6


def test_loops_that_follow_each_other_share_the_steps():
    def looped(made: int) -> list[tuple[str, int]]:
        training, found = Training(made), []
        for name, epochs in (("first", 2), ("second", 1)):
            for epoch, batches in training.epochs(epochs, DataLoader(DATA, BATCH)):
                for _ in batches:
                    found.append((name, epoch))
                    training.made += 1
        for _ in training.steps(range(3)):
            found.append(("third", 0))
            training.made += 1
        return found

    whole = looped(0)
    assert len(whole) == 6 + 6 + 6 + 3
    for made in range(len(whole) + 1):
        assert looped(made) == whole[made:]


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1), (1, 2)])
def test_another_number_of_trainers_goes_on_at_the_same_data(before, now):
    """Of three epochs shared out by DistributedSampler, which all trainers of a number see together."""
    data = TensorDataset(torch.arange(36))

    def trained(
        size: int, until: int, place: Place | None, made: int
    ) -> tuple[list[Any], list[Place | None]]:
        """Return epoch and sample of all that `size` trainers train on, and where each of them is then."""
        seen, places = [], []
        for rank in range(size):
            training = Training(made)
            training._loops.resume(place)
            sampler: Sampler[int] = DistributedSampler(data, size, rank)
            for epoch, batches in training.epochs(EPOCHS, DataLoader(data, 2, sampler=sampler)):
                for (samples,) in batches:
                    if training.made == until:
                        break
                    seen += [(epoch, number) for number in samples.tolist()]
                    training.made += 1
                if training.made == until:
                    break
            places.append(training._loops.place(training.made))
        return seen, places

    for until in (6 // before, 18 // before, 24 // before):  # after so many batches of all trainers
        first, places = trained(before, until, None, 0)
        assert len(set(places)) == 1
        rest, _ = trained(now, 1 << 30, places[0], until)
        assert sorted(first + rest) == [(epoch, sample) for epoch in range(EPOCHS) for sample in range(36)]


def test_loops_before_a_place_are_over_and_those_after_it_follow():
    """Two loops of 4 and 8 steps, left after the second of the second, by shares of half the size."""
    training = Training(made=6)
    training._loops.resume(Place(loops=1, steps=2, per_epoch=8))
    found: list[tuple[str, int]] = []
    for name, length in (("first", 2), ("second", 4), ("third", 3)):
        for step in training.steps(range(length)):
            found.append((name, step))
            training.made += 1
    assert found == [*(("second", step) for step in (1, 2, 3)), *(("third", step) for step in range(3))]


def test_a_loop_in_the_middle_of_another_one_is_refused():
    training = Training()
    for _ in training.epochs(2, DataLoader(DATA, BATCH)):
        with pytest.raises(ConfigurationError, match=r"fleet\.steps: an earlier loop has not ended"):
            next(training.steps(range(3)))
        break


def test_steps_are_entered_in_the_middle_with_their_scheduler():
    def rates(made: int) -> list[tuple[int, str]]:
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=11)
        found = []
        for step in Training(made).steps(range(10), scheduler):
            found.append((step, optimizer.param_groups[0]["lr"].hex()))
            optimizer.step()
            scheduler.step()
        return found

    whole = rates(0)
    for made in range(11):
        assert rates(made) == whole[made:]


def test_a_scheduler_begins_with_its_own_rate_where_a_checkpoint_has_set_that_of_later():
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.StepLR(optimizer, 2, 0.5)]
    )
    optimizer.param_groups[0]["lr"] = 0.125  # as the checkpoint of step 2 has it
    next(Training(2).steps(range(10), scheduler))
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_scheduler_whose_state_was_loaded_is_brought_on_from_there():
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    next(Training(5).steps(range(10), scheduler))
    assert scheduler.last_epoch == 5
    assert optimizer.param_groups[0]["lr"] == 0.5**5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda: Training().epochs(-1, [1]), "epochs is -1; expected a whole", id="epochs"),
        pytest.param(lambda: Training().epochs(1, []), "the loader has 0 batches", id="no-batches"),
        pytest.param(
            lambda: Training().epochs(1, [1], batches_per_step=0), "batches_per_step is 0", id="per-step"
        ),
        pytest.param(
            lambda: Training().epochs(1, [1], DataLoader(DATA)),
            "found DataLoader instead of a scheduler",
            id="no-scheduler",
        ),
        pytest.param(
            lambda: Training().steps(
                [1], lr_scheduler.ReduceLROnPlateau(SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
            ),
            r"ReduceLROnPlateau\.step\(\) requires metrics.*in a checkpoint",
            id="plateau",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_the_first_step(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()


def test_steps_that_do_not_fit_the_batches_are_told_once(caplog):
    training = Training()
    for _, batches in training.epochs(3, DataLoader(DATA, BATCH)):
        for number, _ in enumerate(batches):
            training.made += number % 2
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    (once,) = said
    assert "epoch 0 ran 3 steps, but its batches are for 6" in once


def test_a_sampler_whose_order_nobody_knows_is_named_where_it_matters(caplog):
    class Mine(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(SAMPLES)

        def __len__(self) -> int:
            return SAMPLES

    for made, expected in ((0, False), (1, True)):
        caplog.clear()
        next(Training(made).epochs(1, DataLoader(DATA, BATCH, sampler=Mine())))
        assert ("Mine has neither set_epoch(epoch) nor a generator" in caplog.text) is expected


def test_one_process_by_itself_makes_all_steps(monkeypatch):
    monkeypatch.setattr(progress, "made", lambda: None)
    loop = fleet.epochs(2, DataLoader(DATA, BATCH, shuffle=True, drop_last=True))
    assert [(epoch, len(list(batches))) for epoch, batches in loop] == [(0, 5), (1, 5)]
    assert list(fleet.steps(range(4))) == [0, 1, 2, 3]


def test_a_session_without_a_fleet_of_the_script_is_gone_on_with(monkeypatch):
    monkeypatch.setattr(progress, "made", lambda: 3)
    monkeypatch.setattr("fleet.loop.loop._process._loops", Loops())
    assert list(fleet.steps(range(5))) == [3, 4]


def test_the_loop_of_the_documentation_goes_on_in_the_middle():
    page = Path(__file__).parents[4] / "docs" / "loops.md"
    (block,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    training, model = Training(7), torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: setattr(training, "made", training.made + 1))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), 4, shuffle=True)
    names = {"fleet": training, "loader": loader, "scheduler": scheduler, "optimizer": optimizer}
    exec(block, {**names, "model": model, "loss_fn": torch.nn.functional.mse_loss})  # noqa: S102
    assert training.made == 30 * 2
    assert scheduler.last_epoch == 30


def test_loops_follow_each_other_where_the_count_of_steps_comes_late():
    """As in GEO, where it is of the steps that the servers know of."""
    loops = Loops()
    begun = []
    for made in (0, 8, 20):
        begun.append(loops.begin("fleet.steps", made, 10, 1))
        loops.end(begun[-1], 10)
    assert begun == [0, 10, 20]
