"""Learning-rate schedulers as they would be, had this process made all of the steps."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from fleet.errors import ConfigurationError

__all__ = ["Schedulers", "advance", "schedulers_of"]

Schedulers = Any
"""A scheduler, several in the order in which the script steps them, or None."""


def schedulers_of(call: str, given: Schedulers) -> tuple[Any, ...]:
    """Return the schedulers that a script has handed over.

    Raises
    ------
    ConfigurationError
        One of them is none, or is stepped with what only the script knows.
    """
    schedulers = tuple(given) if isinstance(given, Sequence) else () if given is None else (given,)
    for each in schedulers:
        step = getattr(each, "step", None)
        if not callable(step) or not hasattr(each, "get_last_lr"):
            raise ConfigurationError(
                f"{call}: found {type(each).__name__} where a scheduler belongs; expected one of "
                "torch.optim.lr_scheduler, or several in a list"
            )
        needed = [
            name
            for name, parameter in inspect.signature(step).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if needed:
            raise ConfigurationError(
                f"{call}: {type(each).__name__}.step() wants {', '.join(needed)}, which nobody can repeat "
                "for steps that have been made; keep this scheduler's state_dict() in a checkpoint "
                "(fleet.TrainStatus(state=...)), and do not hand the scheduler over"
            )
    return schedulers


def advance(by_epoch: Sequence[Any], by_step: Sequence[Any], epochs: Sequence[int], steps: int) -> None:
    """Step schedulers up to where a script that had made these steps would have brought them.

    One that has never been stepped begins with the learning rates that it has set when it was built: those
    of the param groups may be a checkpoint's, and are then those of later.

    Parameters
    ----------
    by_epoch, by_step : sequence of LRScheduler
        What is stepped at each epoch's end, and after each step.
    epochs : sequence of int
        How many steps each epoch had that has come to its end.
    steps : int
        How many steps were made after them.
    """
    made = {id(each): _made(each) for each in (*by_step, *by_epoch)}
    for each in (*by_step, *by_epoch):
        if made[id(each)] == 0 < sum(epochs) + steps:
            for group, rate in zip(each.optimizer.param_groups, each.get_last_lr(), strict=True):
                group["lr"] = rate

    def step(schedulers: Sequence[Any], count: int) -> None:
        for each in schedulers:
            if made[id(each)] <= count:
                each.step()

    done = 0
    with warnings.catch_warnings():  # that no optimizer.step() came in between
        warnings.simplefilter("ignore", UserWarning)
        for epoch, length in enumerate(epochs):
            for count in range(done, done + length):
                step(by_step, count)
            done += length
            step(by_epoch, epoch)
        for count in range(done, done + steps):
            step(by_step, count)


def _made(scheduler: Any) -> int:
    """Return how often a scheduler has been stepped; a ChainedScheduler does not count it itself."""
    inner = getattr(scheduler, "_schedulers", ())
    counted = scheduler if hasattr(scheduler, "last_epoch") or not inner else inner[0]
    return int(counted.last_epoch)
