"""Which attempts a replica can have: nobody takes a trainer's place for good by a number out of the air."""

from typing import Final

from fleet.errors import ConfigurationError

__all__ = ["check_issued"]

_MOST_AT_FIRST: Final = 1 << 24
"""More than half a year of restarts, one a second: what a replica may have behind it when it comes."""
_SPARE: Final = 1000
"""How many more than one restart a second are let pass: a server that was frozen has counted fewer."""


def check_issued(trainer: int, attempt: int, first: tuple[int, float] | None, now: float) -> None:
    """Check that a replica can have been started so often: a restart takes a second at least.

    It is counted from the first join, so that no join makes room for another with a higher attempt.
    """
    most = _MOST_AT_FIRST if first is None else first[0] + int(now - first[1]) + _SPARE
    if attempt > most:
        raise ConfigurationError(
            f"trainer {trainer} came with attempt {attempt}, expected {most} at most: no replica can "
            "have been started so often by now; FLEET_RESTARTS counts the starts of this replica before "
            "this one, and whoever starts it must count them up one by one"
        )
