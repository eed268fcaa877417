"""How far a script has come, in its own words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TrainStatus"]


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """What a script needs, beside the values, to go on where a checkpoint was made.

    Attributes
    ----------
    epoch_no : int
        The last epoch that was completed; -1 before the first one's end.
    step : int
        The number of steps made when the checkpoint was saved. It is filled in by the save.
    state : mapping
        Whatever else the script wants to find again, such as ``{"scheduler": scheduler.state_dict()}``:
        numbers, strings, None, tensors and arrays, and lists, tuples and dicts of these.

    Notes
    -----
    The original's ``fluid.incubate.fleet.collective.TrainStatus``, whose whole is `epoch_no`.
    """

    epoch_no: int = -1
    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)

    def next(self) -> int:
        """Return the epoch to go on with."""
        return self.epoch_no + 1
