"""Gradients and weights that are no numbers: told of once, refused, or left out, as the strategy says.

One NaN in a gradient makes its weights NaN, and soon all of them; the training goes on and is lost.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import FleetError
from fleet.process import progress

__all__ = ["COUNTER", "NO_ROWS", "FiniteCheck", "OfRows", "tell_of_weights"]

COUNTER: Final = "non_finite_parameters"
"""The counter, in the progress and the last words, of parameters that hold NaN or infinity at the end."""

SKIPPED: Final = "steps_skipped"
"""The counter of steps that were not made because a gradient was not finite."""

OfRows = Mapping[str, tuple[NDArray[np.int64], Tensor]]
"""Gradients by table: ids, and a row for each."""
NO_ROWS: Final[OfRows] = {}
NO_LOST_ROWS: Final[Mapping[str, str]] = {}

_FIRST_STEPS: Final = 4
_SAMPLED_STEPS: Final = 16
_NAMED: Final = 3
_HELP: Final = "lower the learning rate, clip gradients (strategy.grad_clip), or look at the data"
_log = logging.getLogger(__name__)


class FiniteCheck:
    """Looks for gradients that hold NaN or infinity.

    To warn, it looks in the first steps and in every sixteenth, as weights that are lost once stay so: that
    passes over the gradients once more, and on a GPU waits for them. To stop or to skip, it looks in every
    step. Rows of tables it looks at in every step: they are few, just merged and in memory of the host, and a
    row that is lost shows nowhere else if no batch has it again.

    Parameters
    ----------
    action : str
        ``warn``, once; ``stop``: an error; ``skip``: the step is not made.
    trainer : int
        Whose gradients they are.
    made : callable
        Returns how many steps have been made, for what people are told.
    """

    def __init__(self, action: str, trainer: int, made: Callable[[], int]) -> None:
        self.action = action
        self._trainer = trainer
        self._made = made
        self._step = 0
        self._warned = False
        self._warned_of_rows = False
        self.lost_rows: dict[str, str] = {}
        """By table, which of its rows was the first to be stepped with such a gradient, and when."""

    @property
    def looks(self) -> bool:
        """Whether the gradients of the next step are looked at, beside those of rows."""
        often = self.action != "warn"
        return often or not (self._warned or (self._step >= _FIRST_STEPS and self._step % _SAMPLED_STEPS))

    def lets_step(self, gradients: Mapping[str, Tensor], of_rows: OfRows = NO_ROWS) -> bool:
        """Look at the gradients of the next step; return whether it is to be made.

        Parameters
        ----------
        gradients : mapping of name to Tensor
            Of any dtype and device, sparse ones too.
        of_rows : mapping of name to (ids, Tensor)
            Those of tables, with a row for each id; looked at in every step.

        Raises
        ------
        FleetError
            One of them is not finite, and the strategy says to stop.
        """
        looks = self.looks
        self._step += 1
        lost = _lost_rows(of_rows)
        dense = looks and not _are_finite(list(gradients.values()))
        if not dense and not lost:
            return True
        names = [_first_of(gradients)] if dense else []
        names += [f"row {row} of table {table}" for table, row in lost.items()][:1]
        found = (
            f"the gradient of {' and that of '.join(names)} holds NaN or infinity on trainer {self._trainer} "
            f"in step {self._made()}"
        )
        if self.action == "stop":
            raise FleetError(
                f"{found}, and strategy.non_finite is 'stop': {_HELP}; 'skip' leaves such steps out"
            )
        if self.action == "skip":
            progress.count(SKIPPED)
        else:
            for table, row in lost.items():
                self.lost_rows.setdefault(table, f"row {row} in step {self._made()}")
        if (dense and not self._warned) or (lost and not self._warned_of_rows):
            does = "such steps are left out" if self.action == "skip" else "the weights become the same"
            _log.warning("%s; %s, and this is said once. Else %s", found, does, _HELP)
        self._warned |= dense
        self._warned_of_rows |= bool(lost)
        return self.action != "skip"


def tell_of_weights(
    parameters: Mapping[str, Tensor], step: int | None, lost_rows: Mapping[str, str] = NO_LOST_ROWS
) -> None:
    """Warn, and count, if parameters hold NaN or infinity as their training ends.

    Parameters
    ----------
    parameters : mapping of name to Tensor
        With the values that the training has come to.
    step : int, optional
        How many steps it has made.
    lost_rows : mapping of name to str
        As of `FiniteCheck`: tables whose rows nobody reads all of, so that what has been found counts.
    """
    lost = [name for name, value in parameters.items() if not bool(torch.isfinite(value).all())]
    lost += [f"table {name} ({which})" for name, which in lost_rows.items()]
    if not lost:
        return
    progress.count(COUNTER, len(lost))
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    _log.warning(
        "the training ends%s with NaN or infinity in %d of %d parameters: %s%s; what is saved of them is of"
        " no use. The loss shows where it went wrong: %s",
        "" if step is None else f" after step {step}",
        len(lost),
        len(parameters.keys() | lost_rows.keys()),
        ", ".join(lost[:_NAMED]),
        more,
        _HELP,
    )


def _first_of(gradients: Mapping[str, Tensor]) -> str:
    """Name the first gradient that is not finite."""
    lost = (name for name, each in gradients.items() if not bool(torch.isfinite(_numbers(each)).all()))
    return next(lost, "some parameter")


def _lost_rows(of_rows: OfRows) -> dict[str, int]:
    """Return by table the first row whose gradient is not finite.

    NaN and infinity stay in a sum, which is the fastest pass that there is; where it is not finite, it may
    also be too large.
    """
    first = {}
    for name, (ids, rows) in of_rows.items():
        if not math.isfinite(rows.sum().item()):
            lost = (~torch.isfinite(rows).all(dim=1)).nonzero()
            if len(lost):
                first[name] = int(ids[int(lost[0])])
    return first


def _numbers(gradient: Tensor) -> Tensor:
    """Return what a gradient holds; of a sparse one the values that it has."""
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def _are_finite(gradients: list[Tensor]) -> bool:
    """Whether all numbers are finite: a norm is then, and NaN and infinity stay in it.

    The Euclidean norm takes a fifteenth of the time of the largest magnitude on a CPU. Its squares may be too
    large where the numbers are not, so only the latter has the last word.
    """
    some = [numbers for numbers in map(_numbers, gradients) if numbers.numel()]
    norms = (torch.nn.utils.get_total_norm(some, norm_type=kind) for kind in (2.0, torch.inf))
    return not some or any(bool(torch.isfinite(norm)) for norm in norms)
