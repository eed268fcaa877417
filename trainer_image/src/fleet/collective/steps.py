"""The steps that this trainer has made with one optimizer, beside those of the others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.collective.group import Group
from fleet.collective.history import Account, History, Step, after_average, difference
from fleet.errors import ConfigurationError

__all__ = ["Steps"]


class Steps:
    """Counts steps, and compares them with the other trainers'.

    Parameters
    ----------
    group : Group
    after : callable, optional
        Says what a step came after, given the number that was counted then: averages of gradients.
    """

    def __init__(self, group: Group, after: Callable[[int], str] = after_average) -> None:
        self._group = group
        self._after = after
        self._history = History()
        self.number = 0
        """How many have been made, from the job's beginning."""

    @property
    def digest(self) -> int:
        """Of all steps of this process; 32 bits."""
        return self._history.digest

    def note(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note that the optimizer has stepped, with these hyper-parameters."""
        self._history.add(Step(self.number, groups))

    def note_left_out(self) -> None:
        """Note that gradients were cleared on which no step was made."""
        self._history.add(Step(self.number, None))

    def compare(self, what: str) -> None:
        """Compare the steps of all trainers, in a call that each makes.

        Raises
        ------
        ConfigurationError
            Another trainer has stepped otherwise; the message names it, and says how.
        """
        place = self._group.place
        texts = self._group.agree(what, self._history.account.to_text())
        accounts = {rank: Account.from_text(text) for rank, text in texts.items()}
        if (found := difference(accounts, place.rank, self._after)) is not None:
            rank, how = found
            raise ConfigurationError(f"{place.name(rank)} {how}")
