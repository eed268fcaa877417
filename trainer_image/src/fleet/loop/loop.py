"""``fleet.epochs`` and ``fleet.steps``: the loops of a script, without what has been made of them.

A loop covers the steps that follow those of the loop before it. Where the training is when the first batch is
asked for says what is left: the epoch, the batch, and how often schedulers have been stepped.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, TypeVar, cast

from fleet.errors import ConfigurationError
from fleet.loop.batches import Batches, Order, length_of, rest_of
from fleet.loop.place import Loops
from fleet.loop.schedulers import Schedulers, advance, schedulers_of
from fleet.process import progress

__all__ = ["LoopCalls", "epochs", "steps"]

Loader = TypeVar("Loader", bound=Iterable[Any])
Batch = TypeVar("Batch")

_END: Final = object()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a loop over epochs begins."""

    batch: int
    rest: Callable[[], Iterator[Any]]
    """Iterates over what is left of that epoch."""
    epochs: tuple[int, ...]
    """How many steps each epoch had that has come to its end."""
    steps: int
    """How many steps were made of the one that has not."""

    @property
    def epoch(self) -> int:
        """The epoch to go on with."""
        return len(self.epochs)


class LoopCalls(ABC):
    """Loops for a training whose steps somebody counts; the heir knows who."""

    _compared = False
    """Whether it has been said that steps and batches do not go together."""

    @cached_property
    def _loops(self) -> Loops:
        """The loops so far."""
        return Loops()

    @abstractmethod
    def _steps_made(self) -> int | None:
        """Return the number of steps made, from the job's beginning; None where nobody counts them."""

    def epochs(
        self,
        epochs: int,
        loader: Loader,
        scheduler: Schedulers = None,
        *,
        step_scheduler: Schedulers = None,
        batches_per_step: int = 1,
        seed: int = 0,
    ) -> Iterator[tuple[int, Loader]]:
        """Iterate over the epochs that are left, each with those of its batches that are left.

        ``for epoch, loader in fleet.epochs(30, loader):`` in place of ``for epoch in range(30):``. A script
        makes one ``optimizer.step()`` for each batch. The epoch decides the order of a loader that shuffles:
        its samplers are told by ``set_epoch``, or are given a generator seeded with ``seed + epoch``.

        Parameters
        ----------
        epochs : int
            How many there are in all.
        loader : iterable
            Usually a DataLoader over this trainer's share. One whose dataset is an IterableDataset, and any
            other iterable that is no sequence, is read from the epoch's beginning to find a batch again.
        scheduler : LRScheduler or sequence of them, optional
            What the script steps at each epoch's end; it is first brought to where it would be.
        step_scheduler : LRScheduler or sequence of them, optional
            What the script steps after each ``optimizer.step()``; likewise.
        batches_per_step : int
            How many batches one ``optimizer.step()`` is for. What remains at an epoch's end makes no step.
        seed : int
            Of the shuffle, where the loader has no generator of its own.

        Yields
        ------
        epoch : int
            From 0 on.
        batches : iterable
            What is left of the epoch. In all else it is as `loader`: its ``len()`` is the whole epoch's.

        Raises
        ------
        ConfigurationError
            An argument is none that is expected, or the loop before this one did not come to its end.
        """
        call = "fleet.epochs"
        _check_count(call, "epochs", epochs, 0)
        _check_count(call, "batches_per_step", batches_per_step, 1)
        by_epoch, by_step = schedulers_of(call, scheduler), schedulers_of(call, step_scheduler)
        length = length_of(loader)
        if length is not None and length < batches_per_step:
            raise ConfigurationError(
                f"{call}: the loader has {length} batches, and a step is for {batches_per_step}; expected "
                "enough for one step (with drop_last, a share of the data may be smaller than a batch)"
            )
        schedulers = by_epoch, by_step
        return self._epochs_left(
            call, epochs, loader, length, Order(loader, seed), schedulers, batches_per_step
        )

    def _epochs_left(
        self,
        call: str,
        epochs: int,
        loader: Loader,
        length: int | None,
        order: Order,
        schedulers: tuple[tuple[Any, ...], tuple[Any, ...]],
        per_step: int,
    ) -> Iterator[tuple[int, Loader]]:
        """Iterate over the epochs that are left from where the training is once the first is asked for.

        The schedulers are those that step by epoch, and those that step by step.
        """
        per_epoch = None if length is None else length // per_step
        base, start = self._begin_loop(call, per_epoch, epochs)
        entry = _entry_of(loader, order, epochs, start, per_step)
        advance(*schedulers, entry.epochs, entry.steps)
        if start:
            _tell(base + start, epochs, length, entry, order)
        for epoch in range(entry.epoch, epochs):
            order.begin(epoch)
            before = self._steps_made()
            enter = self._enter(loader, before, entry.rest) if epoch == entry.epoch else loader.__iter__
            yield epoch, cast("Loader", Batches(loader, enter))
            if length is not None:
                expected = (length - (entry.batch if epoch == entry.epoch else 0)) // per_step
                self._compare_steps(epoch, before, expected)
        self._end_loop(base, None if per_epoch is None else epochs * per_epoch)

    def steps(
        self,
        batches: Iterable[Batch],
        scheduler: Schedulers = None,
        *,
        batches_per_step: int = 1,
        seed: int = 0,
    ) -> Iterator[Batch]:
        """Iterate over the batches that are left of a single pass, each of which is for one step.

        ``for step in fleet.steps(range(1000)):`` in place of ``for step in range(1000):``, or
        ``for x, y in fleet.steps(loader):`` where there are no epochs. The other arguments are as in
        `epochs`.

        Parameters
        ----------
        batches : iterable
        scheduler : LRScheduler or sequence of them, optional
            What the script steps after each ``optimizer.step()``.
        batches_per_step, seed : int

        Raises
        ------
        ConfigurationError
            As in `epochs`.
        """
        call = "fleet.steps"
        _check_count(call, "batches_per_step", batches_per_step, 1)
        by_step, length, order = schedulers_of(call, scheduler), length_of(batches), Order(batches, seed)

        def loop() -> Iterator[Batch]:
            per_epoch = None if length is None else length // batches_per_step
            base, start = self._begin_loop(call, per_epoch, 1)
            made = start * batches_per_step
            if length is not None:
                made = min(made, length - length % batches_per_step)
            advance((), by_step, (), made // batches_per_step)
            order.begin(0)
            if start:
                of = "" if length is None else f" of {length}"
                _log.info("the training is at step %d: going on after %d%s batches", base + start, made, of)
                _warn_of_unknown(order)
            yield from rest_of(batches, made)
            self._end_loop(base, per_epoch)

        return loop()

    def _begin_loop(self, call: str, per_epoch: int | None, epochs: int) -> tuple[int, int]:
        """Begin a loop; return the step that is its first, and how many of its own are made."""
        made = self._steps_made()
        if made is None:
            return 0, 0
        base = self._loops.begin(call, made, per_epoch, epochs)
        return base, max(0, made - base)

    def _end_loop(self, base: int, steps: int | None) -> None:
        """Note how many steps the loops so far cover, with those of this one."""
        if self._steps_made() is not None:
            self._loops.end(base, steps)

    def _enter(
        self, loader: Iterable[Batch], start: int | None, rest: Callable[[], Iterator[Batch]]
    ) -> Callable[[], Iterator[Batch]]:
        """Return what iterates over the rest of an epoch, and over all of it once a step has been made."""
        return lambda: rest() if self._steps_made() == start else iter(loader)

    def _compare_steps(self, epoch: int, before: int | None, expected: int) -> None:
        """Say once that steps and batches do not go together: a restart would go on elsewhere."""
        made = (self._steps_made() or 0) - (before or 0)
        if before is None or made == expected or self._compared:
            return
        self._compared = True
        _log.warning(
            "epoch %d made %d steps where its batches are for %d: a trainer that is restarted would go on at "
            "another batch. Make one optimizer.step() for each batch, or for every batches_per_step of them "
            "(fleet.epochs)",
            epoch,
            made,
            expected,
        )


class _Process(LoopCalls):
    """The loops of a script without a `fleet` of its own: where its runtime is, if there is one."""

    def _steps_made(self) -> int | None:
        return progress.made()


_process = _Process()


def epochs(
    epochs: int,
    loader: Loader,
    scheduler: Schedulers = None,
    *,
    step_scheduler: Schedulers = None,
    batches_per_step: int = 1,
    seed: int = 0,
) -> Iterator[tuple[int, Loader]]:
    """Iterate over the epochs that are left; see `LoopCalls.epochs`.

    In a process that trains by itself, without parameter servers and without other trainers, that is all of
    them.

    Parameters
    ----------
    epochs, loader, scheduler, step_scheduler, batches_per_step, seed
        As of `LoopCalls.epochs`.

    Yields
    ------
    epoch : int
        From 0 on.
    batches : iterable
        What is left of the epoch.

    Raises
    ------
    ConfigurationError
        As of `LoopCalls.epochs`.
    """
    return _process.epochs(
        epochs,
        loader,
        scheduler,
        step_scheduler=step_scheduler,
        batches_per_step=batches_per_step,
        seed=seed,
    )


def steps(
    batches: Iterable[Batch],
    scheduler: Schedulers = None,
    *,
    batches_per_step: int = 1,
    seed: int = 0,
) -> Iterator[Batch]:
    """Iterate over the batches that are left of a single pass; see `LoopCalls.steps`.

    Parameters
    ----------
    batches, scheduler, batches_per_step, seed
        As of `LoopCalls.steps`.

    Yields
    ------
    batch
        As it comes from `batches`.

    Raises
    ------
    ConfigurationError
        As of `LoopCalls.steps`.
    """
    return _process.steps(batches, scheduler, batches_per_step=batches_per_step, seed=seed)


def _entry_of(loader: Iterable[Any], order: Order, epochs: int, start: int, per_step: int) -> _Entry:
    """Return where a loop begins of which `start` steps have been made."""
    length = length_of(loader)
    if length is None:
        return _entry_by_reading(loader, order, epochs, start, per_step)
    per_epoch = length // per_step
    epoch, step = divmod(min(start, epochs * per_epoch), per_epoch)
    batch = step * per_step
    return _Entry(batch, lambda: rest_of(loader, batch), (per_epoch,) * epoch, step)


def _entry_by_reading(loader: Iterable[Any], order: Order, epochs: int, start: int, per_step: int) -> _Entry:
    """Read, epoch by epoch, what has been made: how long an epoch is, only its end says."""
    made: list[int] = []
    while start > sum(made) and len(made) < epochs:
        order.begin(len(made))
        left = (start - sum(made)) * per_step
        batches, batch = iter(loader), 0
        while (following := next(batches, _END)) is not _END and batch < left:
            batch += 1
        if following is not _END:
            entered = chain((following,), batches)
            return _Entry(batch, entered.__iter__, tuple(made), batch // per_step)
        made.append(batch // per_step)
    return _Entry(0, lambda: iter(loader), tuple(made), 0)


def _tell(step: int, epochs: int, length: int | None, entry: _Entry, order: Order) -> None:
    if entry.epoch == epochs:
        _log.info("the training is at step %d: nothing is left of the %d epochs", step, epochs)
        return
    of = "" if length is None else f" of {length}"
    _log.info(
        "the training is at step %d: going on after %d of %d epochs and %d%s batches",
        step,
        entry.epoch,
        epochs,
        entry.batch,
        of,
    )
    _warn_of_unknown(order)


def _warn_of_unknown(order: Order) -> None:
    if order.unknown:
        _log.warning(
            "%s has neither set_epoch(epoch) nor a generator: the order of this epoch may be another than "
            "before the restart, so that some samples come twice and others not at all",
            " and ".join(order.unknown),
        )


def _check_count(call: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{call}: {name} is {value!r}; expected a whole number of at least {least}")
