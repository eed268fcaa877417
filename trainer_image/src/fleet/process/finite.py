"""Checks of gradients and weights for NaN and infinity; they warn, stop training or skip the step.

The strategy selects the action. One NaN in a gradient makes the stepped weights NaN, and soon all weights.
Training would continue, but its result would be useless.
"""

import logging
import math
import sys
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
"""The name of the counter of parameters that hold NaN or infinity at the end of training."""

SKIPPED: Final = "steps_skipped"
"""The name of the counter of steps that were skipped because a gradient was not finite."""

OfRows = Mapping[str, tuple[NDArray[np.int64], Tensor]]
"""The gradients of each table: ids, and one row for each id."""
NO_ROWS: Final[OfRows] = {}
NO_LOST_ROWS: Final[Mapping[str, str]] = {}

_FIRST_STEPS: Final = 4
_SAMPLED_STEPS: Final = 16
_NAMED: Final = 3
_HELP: Final = "lower the learning rate, clip gradients (strategy.grad_clip), or look at the data"
_log = logging.getLogger(__name__)


class FiniteCheck:
    """Checks the gradients of each step for NaN and infinity.

    For ``warn``, dense gradients are checked in the first steps and in every sixteenth step, because weights
    that are not finite stay so, and because a check reads all gradients and, on a GPU, waits for them. For
    ``stop`` and ``skip``, they are checked in every step. The rows of tables are always checked in every
    step: they are few and in host memory, and a non-finite row that no later batch contains would otherwise
    never be detected.

    Parameters
    ----------
    action : str
        ``warn``: log once; ``stop``: raise an error; ``skip``: skip the step.
    trainer : int
        The index of this trainer, for messages.
    made : callable
        Returns the number of steps run, for messages.
    """

    def __init__(self, action: str, trainer: int, made: Callable[[], int]) -> None:
        self.action = action
        self._trainer = trainer
        self._made = made
        self.next_look = 0
        """The number of the next step whose dense gradients are checked, in the numbering of `lets_step`."""
        self._step = 0
        self._warned = False
        self._warned_of_rows = False
        self.lost_rows: dict[str, str] = {}
        """For each table, the first row that was stepped with a non-finite gradient, and its step."""

    @property
    def looks(self) -> bool:
        """True if the dense gradients of the next step will be checked."""
        return self._step >= self.next_look

    def restart(self) -> None:
        """Forget the affected rows and check the next step, because new weights have been loaded."""
        self.lost_rows.clear()
        self.next_look = 0

    def lets_step(
        self, gradients: Mapping[str, Tensor], of_rows: OfRows = NO_ROWS, step: int | None = None
    ) -> bool:
        """Check the gradients of a step; return False if the step must be skipped.

        Parameters
        ----------
        gradients : mapping of name to Tensor
            Dense or sparse gradients, of any dtype and device.
        of_rows : mapping of name to (ids, Tensor)
            The gradients of tables, with a row for each id; checked in every step.
        step : int, optional
            The step, counted from 0; by default the step after the step of the last call. A caller may omit
            the call for a step before `next_look` that has no rows.

        Raises
        ------
        FleetError
            A gradient is not finite and the action is ``stop``.
        """
        step = self._step if step is None else step
        self._step = step + 1
        dense = step >= self.next_look and not _are_finite(list(gradients.values()))
        if self.action != "warn":
            self.next_look = step + 1
        elif dense or self._warned:
            # It is logged once, so another check would have no effect.
            self.next_look = sys.maxsize
        elif step + 1 < _FIRST_STEPS:
            self.next_look = step + 1
        else:
            self.next_look = (step // _SAMPLED_STEPS + 1) * _SAMPLED_STEPS
        lost = _lost_rows(of_rows)
        if not dense and not lost:
            return True
        names = [_first_of(gradients)] if dense else []
        names += [f"row {row} of table {table}" for table, row in lost.items()][:1]
        found = (
            f"the gradient of {' and that of '.join(names)} holds NaN or infinity on trainer {self._trainer} "
            f"in step {self._made()}"
        )
        if self.action == "stop":
            raise FleetError(f"{found}, and strategy.non_finite is 'stop': {_HELP}; 'skip' skips such steps")
        if self.action == "skip":
            progress.count(SKIPPED)
        else:
            for table, row in lost.items():
                self.lost_rows.setdefault(table, f"row {row} in step {self._made()}")
        if (dense and not self._warned) or (lost and not self._warned_of_rows):
            does = (
                "such steps are skipped"
                if self.action == "skip"
                else "the weights become NaN or infinite, too"
            )
            _log.warning("%s; %s. This is logged once. To avoid it, %s", found, does, _HELP)
        self._warned |= dense
        self._warned_of_rows |= bool(lost)
        return self.action != "skip"


def tell_of_weights(
    parameters: Mapping[str, Tensor], step: int | None, lost_rows: Mapping[str, str] = NO_LOST_ROWS
) -> None:
    """Count and log the parameters that contain NaN or infinity at the end of training.

    Parameters
    ----------
    parameters : mapping of name to Tensor
        The parameters with their last values.
    step : int, optional
        The number of steps run.
    lost_rows : mapping of name to str
        See `FiniteCheck.lost_rows`. This function does not read all rows of tables, so it counts the rows
        that were found during training.
    """
    lost = [name for name, value in parameters.items() if not bool(torch.isfinite(value).all())]
    lost += [f"table {name} ({which})" for name, which in lost_rows.items()]
    if not lost:
        return
    progress.count(COUNTER, len(lost))
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    _log.warning(
        "training ends%s with NaN or infinity in %d of %d parameters: %s%s; saved values of these are "
        "useless. The loss curve shows when it went wrong: %s",
        "" if step is None else f" after step {step}",
        len(lost),
        len(parameters.keys() | lost_rows.keys()),
        ", ".join(lost[:_NAMED]),
        more,
        _HELP,
    )


def _first_of(gradients: Mapping[str, Tensor]) -> str:
    """Return the name of the first gradient that contains NaN or infinity."""
    lost = (name for name, each in gradients.items() if not bool(torch.isfinite(_numbers(each)).all()))
    return next(lost, "some parameter")


def _lost_rows(of_rows: OfRows) -> dict[str, int]:
    """Return, for each table, the first row whose gradient contains NaN or infinity.

    NaN and infinity propagate to a sum, which is the fastest way to find them. A sum of finite numbers may
    overflow, so the elements are checked only if the sum is not finite.
    """
    first = {}
    for name, (ids, rows) in of_rows.items():
        if not math.isfinite(rows.sum().item()):
            lost = (~torch.isfinite(rows).all(dim=1)).nonzero()
            if len(lost):
                first[name] = int(ids[int(lost[0])])
    return first


def _numbers(gradient: Tensor) -> Tensor:
    """Return the values of a dense or sparse gradient."""
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def _are_finite(gradients: list[Tensor]) -> bool:
    """Return whether all values are finite; the check uses a norm, because norms propagate NaN and infinity.

    On a CPU the Euclidean norm takes a fifteenth of the time of the maximum norm. Its squares may overflow
    although all values are finite, so the maximum norm decides if the Euclidean norm is not finite.
    """
    some = [numbers for numbers in map(_numbers, gradients) if numbers.numel()]
    norms = (torch.nn.utils.get_total_norm(some, norm_type=kind) for kind in (2.0, torch.inf))
    return not some or any(bool(torch.isfinite(norm)) for norm in norms)
