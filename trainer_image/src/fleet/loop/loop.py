"""The loops ``fleet.epochs`` and ``fleet.steps``, which resume at the job's current step.

Loops run in sequence: each covers the steps after those of the previous loop. When the script requests the
first batch, the number of completed steps determines the remaining epochs and batches, and the state to which
schedulers are advanced.
"""

import inspect
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, TypeVar, cast

from fleet.errors import ConfigurationError
from fleet.loop.batches import Batches, Order, length_of, rest_of
from fleet.process import progress

__all__ = ["LoopCalls", "Loops", "Place", "epochs", "steps"]

Loader = TypeVar("Loader", bound=Iterable[Any])
Batch = TypeVar("Batch")
Schedulers = Any
"""A scheduler, a sequence of them in the order in which the script steps them, or None."""

_END: Final = object()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A training run's position in its loops, expressed independently of the number of trainers.

    With more trainers, each trainer's share of the data has fewer batches. The position therefore counts
    steps relative to those of an epoch: completed epochs stay completed, and the same fraction of the current
    epoch is done.

    Attributes
    ----------
    loops : int
        The number of loops before the current one.
    steps : int
        The number of steps run in the current loop.
    per_epoch : int
        The number of steps in one epoch of the current loop; at least 1.
    """

    loops: int
    steps: int
    per_epoch: int

    def steps_of(self, loop: int, per_epoch: int, epochs: int) -> int | None:
        """Return the number of completed steps of a loop, or None if the loop has not begun.

        The completed part of the current epoch is rounded down: a batch may be used twice, but none is
        skipped if the shares divide evenly.
        """
        if loop != self.loops:
            return epochs * per_epoch if loop < self.loops else None
        epoch, steps = divmod(self.steps, self.per_epoch)
        return epoch * per_epoch + steps * per_epoch // self.per_epoch


class Loops:
    """Maps a training run's steps to its loops, which run one after another."""

    def __init__(self) -> None:
        self._covered: int | None = 0
        """The number of steps that the loops so far cover; None if unknown."""
        self._begun = 0
        self._current: tuple[int, int, int | None] = (0, 0, None)
        """The number of the latest loop, its first step, and the number of steps in its epoch."""
        self._resumed: Place | None = None

    def begin(self, call: str, made: int, per_epoch: int | None, epochs: int) -> int:
        """Begin a loop; return the training step, possibly negative, at which its first epoch starts.

        Parameters
        ----------
        call : str
            The call that begins it, for the error.
        made : int
            The number of steps run since the beginning of the job.
        per_epoch, epochs : int or None, int
            The steps of an epoch, None if unknown; and the number of epochs.

        Raises
        ------
        ConfigurationError
            The previous loop has not ended.
        """
        # Unknown until this loop ends.
        base, self._covered = self._covered, None
        if base is None:
            raise ConfigurationError(
                f"{call}: an earlier loop has not ended, or has no length, so the steps of this one are "
                "unknown; expected one loop after another, each over an object with a len(), or "
                "fleet.epochs once instead of fleet.steps in each epoch"
            )
        if self._resumed is not None and per_epoch is not None:
            steps = self._resumed.steps_of(self._begun, per_epoch, epochs)
            # With another number of trainers, an epoch has another number of steps: the position in the epoch
            # counts.
            base = base if steps is None else made - steps
        # Earlier loops may have run fewer steps than they cover.
        self._current = (self._begun, min(base, made), per_epoch)
        self._begun += 1
        return base

    def end(self, base: int, steps: int | None) -> None:
        """End a loop that began at step `base` and has `steps` steps (None if the number is unknown)."""
        self._covered = None if steps is None else base + steps

    def place(self, made: int) -> Place | None:
        """Return the position of a training run after `made` steps, or None if unknown."""
        loop, base, per_epoch = self._current
        # A checkpoint that was loaded in the meantime may be older than the loop.
        return Place(loop, max(0, made - base), per_epoch) if per_epoch else None

    def resume(self, place: Place | None) -> None:
        """Set the position, loaded from a checkpoint, at which later loops resume."""
        self._resumed = place


@dataclass(frozen=True, slots=True)
class _Entry:
    """The position at which a loop over epochs resumes."""

    batch: int
    rest: Callable[[], Iterator[Any]]
    """Returns an iterator over the remaining batches of the current epoch."""
    epochs: tuple[int, ...]
    """The number of steps of each completed epoch."""
    steps: int
    """The number of steps run in the current epoch."""

    @property
    def epoch(self) -> int:
        """The number of the current epoch."""
        return len(self.epochs)


class LoopCalls(ABC):
    """The methods `epochs` and `steps`; subclasses provide the number of steps of the training run."""

    _warned = False
    """Whether the warning that steps and batches do not match has been logged."""

    @cached_property
    def _loops(self) -> Loops:
        """The loops that have begun in this training run."""
        return Loops()

    @abstractmethod
    def _steps_made(self) -> int | None:
        """Return the number of steps since the start of the job, or None if steps are not counted."""

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
        """Iterate over the remaining epochs, each with its remaining batches.

        Write ``for epoch, loader in fleet.epochs(30, loader):`` in place of ``for epoch in range(30):``. A
        script calls ``optimizer.step()`` once for each batch. The epoch determines the order of a loader that
        shuffles: its samplers receive the epoch by ``set_epoch``, or a generator seeded with ``seed +
        epoch``. In a process that trains alone, all epochs and batches remain.

        Parameters
        ----------
        epochs : int
            The total number of epochs.
        loader : iterable
            Usually a DataLoader over this trainer's share. If it cannot be indexed, because its dataset is an
            IterableDataset or because it is not a sequence, it is read from the beginning of the epoch.
        scheduler : LRScheduler or sequence of them, optional
            The schedulers that the script steps at the end of each epoch; they are first advanced to the
            current step.
        step_scheduler : LRScheduler or sequence of them, optional
            The schedulers that the script steps after each ``optimizer.step()``; also advanced.
        batches_per_step : int
            The number of batches for one ``optimizer.step()``. Remaining batches at the end of an epoch run
            no step.
        seed : int
            The seed of the shuffle, if the loader has no generator of its own.

        Yields
        ------
        epoch : int
            Starting at 0.
        batches : iterable
            The remaining batches. Apart from iteration it behaves as `loader`: its ``len()`` is that of the
            whole epoch.

        Raises
        ------
        ConfigurationError
            An argument is invalid, or the previous loop has not ended.
        """
        call = "fleet.epochs"
        _check_count(call, "epochs", epochs, 0)
        _check_count(call, "batches_per_step", batches_per_step, 1)
        by_epoch, by_step = _schedulers_of(call, scheduler), _schedulers_of(call, step_scheduler)
        length = length_of(loader)
        if length is not None and length < batches_per_step:
            raise ConfigurationError(
                f"{call}: the loader has {length} batches, but a step needs {batches_per_step}; expected "
                "enough for one step (with drop_last, a share of the data may be smaller than a batch)"
            )
        order = Order(loader, seed)

        def loop() -> Iterator[tuple[int, Loader]]:
            per_epoch = None if length is None else length // batches_per_step
            base, start = self._begin_loop(call, per_epoch, epochs)
            entry = _entry_of(loader, order, epochs, start, batches_per_step)
            _advance(by_epoch, by_step, entry.epochs, entry.steps)
            if start:
                _log_resumption(base + start, epochs, length, entry, order)
            for epoch in range(entry.epoch, epochs):
                order.begin(epoch)
                before = self._steps_made()
                enter = self._enter(loader, before, entry.rest) if epoch == entry.epoch else loader.__iter__
                yield epoch, cast("Loader", Batches(loader, enter))
                if length is not None:
                    expected = (length - (entry.batch if epoch == entry.epoch else 0)) // batches_per_step
                    self._compare_steps(epoch, before, expected)
            self._end_loop(base, None if per_epoch is None else epochs * per_epoch)

        return loop()

    def steps(
        self,
        batches: Iterable[Batch],
        scheduler: Schedulers = None,
        *,
        batches_per_step: int = 1,
        seed: int = 0,
    ) -> Iterator[Batch]:
        """Iterate over the remaining batches of one pass over the data.

        Write ``for step in fleet.steps(range(1000)):`` in place of ``for step in range(1000):``, or ``for x,
        y in fleet.steps(loader):`` without epochs. In a process that trains alone, all batches remain.

        Parameters
        ----------
        batches : iterable
            As `loader` of `epochs`.
        scheduler : LRScheduler or sequence of them, optional
            The schedulers that the script steps after each ``optimizer.step()``.
        batches_per_step, seed : int
            As of `epochs`.

        Yields
        ------
        batch
            Each remaining element of `batches`.

        Raises
        ------
        ConfigurationError
            As of `epochs`.
        """
        call = "fleet.steps"
        _check_count(call, "batches_per_step", batches_per_step, 1)
        by_step, length, order = _schedulers_of(call, scheduler), length_of(batches), Order(batches, seed)

        def loop() -> Iterator[Batch]:
            per_epoch = None if length is None else length // batches_per_step
            base, start = self._begin_loop(call, per_epoch, 1)
            made = start * batches_per_step
            if length is not None:
                made = min(made, length - length % batches_per_step)
            _advance((), by_step, (), made // batches_per_step)
            order.begin(0)
            if start:
                of = "" if length is None else f" of {length}"
                _log.info("training resumes at step %d, after %d%s batches", base + start, made, of)
                order.warn_of_unknown()
            yield from rest_of(batches, made)
            self._end_loop(base, per_epoch)

        return loop()

    def _begin_loop(self, call: str, per_epoch: int | None, epochs: int) -> tuple[int, int]:
        """Begin a loop; return the training step at which it starts and the number of its completed steps."""
        made = self._steps_made()
        if made is None:
            return 0, 0
        base = self._loops.begin(call, made, per_epoch, epochs)
        return base, max(0, made - base)

    def _end_loop(self, base: int, steps: int | None) -> None:
        if self._steps_made() is not None:
            self._loops.end(base, steps)

    def _enter(
        self, loader: Iterable[Batch], start: int | None, rest: Callable[[], Iterator[Batch]]
    ) -> Callable[[], Iterator[Batch]]:
        """Return a function that iterates over the remaining batches, or over all batches after a step."""
        return lambda: rest() if self._steps_made() == start else iter(loader)

    def _compare_steps(self, epoch: int, before: int | None, expected: int) -> None:
        """Warn once if an epoch has too many or too few steps: a restart would resume at the wrong batch."""
        made = (self._steps_made() or 0) - (before or 0)
        if before is None or made == expected or self._warned:
            return
        self._warned = True
        _log.warning(
            "epoch %d ran %d steps, but its batches are for %d: a restarted trainer would resume at the "
            "wrong batch. Call optimizer.step() once for each batch, or for every batches_per_step of them "
            "(fleet.epochs)",
            epoch,
            made,
            expected,
        )


class _ProcessLoops(LoopCalls):
    """The loops of a script that has no `fleet` object."""

    def _steps_made(self) -> int | None:
        return progress.made()


_process = _ProcessLoops()
epochs = _process.epochs
steps = _process.steps


def _entry_of(loader: Iterable[Any], order: Order, epochs: int, start: int, per_step: int) -> _Entry:
    """Return the position at which a loop resumes after its first `start` steps."""
    length = length_of(loader)
    if length is None:
        return _entry_by_reading(loader, order, epochs, start, per_step)
    per_epoch = length // per_step
    epoch, step = divmod(min(start, epochs * per_epoch), per_epoch)
    batch = step * per_step
    return _Entry(batch, lambda: rest_of(loader, batch), (per_epoch,) * epoch, step)


def _entry_by_reading(loader: Iterable[Any], order: Order, epochs: int, start: int, per_step: int) -> _Entry:
    """Read batches of a loader without a length to find the position after `start` steps."""
    made: list[int] = []
    while start > sum(made) and len(made) < epochs:
        order.begin(len(made))
        left = (start - sum(made)) * per_step
        batches, batch = iter(loader), 0
        # One batch more is read than was used, to learn whether the epoch ends here.
        while (following := next(batches, _END)) is not _END and batch < left:
            batch += 1
        if following is not _END:
            rest = chain((following,), batches)
            return _Entry(batch, rest.__iter__, tuple(made), batch // per_step)
        made.append(batch // per_step)
    return _Entry(0, lambda: iter(loader), tuple(made), 0)


def _log_resumption(step: int, epochs: int, length: int | None, entry: _Entry, order: Order) -> None:
    if entry.epoch == epochs:
        _log.info("training is at step %d: all %d epochs are complete", step, epochs)
        return
    _log.info(
        "training resumes at step %d, after %d of %d epochs and %d%s batches",
        *(step, entry.epoch, epochs, entry.batch),
        "" if length is None else f" of {length}",
    )
    order.warn_of_unknown()


def _check_count(call: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{call}: {name} is {value!r}; expected a whole number of at least {least}")


def _schedulers_of(call: str, given: Schedulers) -> tuple[Any, ...]:
    """Return the given schedulers as a tuple; raise an error if one cannot be advanced."""
    schedulers = tuple(given) if isinstance(given, Sequence) else () if given is None else (given,)
    for each in schedulers:
        step = getattr(each, "step", None)
        if not callable(step) or not hasattr(each, "get_last_lr"):
            raise ConfigurationError(
                f"{call}: found {type(each).__name__} instead of a scheduler; expected one of "
                "torch.optim.lr_scheduler, or several in a list"
            )
        required = [
            name
            for name, parameter in inspect.signature(step).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if required:
            raise ConfigurationError(
                f"{call}: {type(each).__name__}.step() requires {', '.join(required)}, which only the script "
                "knows; keep this scheduler's state_dict() in a checkpoint (fleet.TrainStatus(state=...)), "
                "and do not pass the scheduler here"
            )
    return schedulers


def _advance(by_epoch: Sequence[Any], by_step: Sequence[Any], epochs: Sequence[int], steps: int) -> None:
    """Advance schedulers to their state after the given steps.

    A scheduler that was never stepped starts from the learning rates that it set when it was built, because
    the rates in the param groups may be later ones, from a checkpoint.

    Parameters
    ----------
    by_epoch, by_step : sequence of LRScheduler
        The schedulers stepped at the end of each epoch, and those stepped after each step.
    epochs : sequence of int
        The number of steps of each completed epoch.
    steps : int
        The number of steps run after those epochs.
    """
    made = {id(each): _times_stepped(each) for each in (*by_step, *by_epoch)}
    for each in (*by_step, *by_epoch):
        if made[id(each)] == 0 < sum(epochs) + steps:
            for group, rate in zip(each.optimizer.param_groups, each.get_last_lr(), strict=True):
                group["lr"] = rate

    def step(schedulers: Sequence[Any], count: int) -> None:
        for each in schedulers:
            # The script may have restored the scheduler from a checkpoint.
            if made[id(each)] <= count:
                each.step()

    done = 0
    with warnings.catch_warnings():  # a scheduler warns if no optimizer.step() preceded it
        warnings.simplefilter("ignore", UserWarning)
        for epoch, length in enumerate(epochs):
            for count in range(done, done + length):
                step(by_step, count)
            done += length
            step(by_epoch, epoch)
        for count in range(done, done + steps):
            step(by_step, count)


def _times_stepped(scheduler: Any) -> int:
    """Return how many times a scheduler's ``step()`` was called."""
    inner = getattr(scheduler, "_schedulers", ())
    counted = scheduler if hasattr(scheduler, "last_epoch") or not inner else inner[0]
    return int(counted.last_epoch)
