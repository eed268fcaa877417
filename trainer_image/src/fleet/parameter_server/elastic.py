"""Elastic jobs, whose number of trainers may change while they run.

The environment says up to how many (``FLEET_MAX_TRAINERS``). A replica was told the number as it was when the
replica started, so that number is no fact that all must share; the bound is, and takes its place.
"""

from typing import Final

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes import Mode

__all__ = ["elastic_facts"]

_FACT: Final = "trainers"
"""What a transpiled program calls the number in its agreement."""


def elastic_facts(mode: Mode, num_trainers: int, max_trainers: int | None) -> dict[str, str]:
    """Return what the processes of an elastic job must have in common instead of the number of trainers.

    Parameters
    ----------
    mode : Mode
    num_trainers : int
        What this process was told.
    max_trainers : int or None
        The bound; None for a job that is not elastic, which has no such facts.

    Raises
    ------
    ConfigurationError
        The mode needs a fixed number, or there are more trainers than the bound allows.
    """
    if max_trainers is None:
        return {}
    if not mode.elastic:
        raise ConfigurationError(
            f"FLEET_MAX_TRAINERS is {max_trainers}, so trainers may come and go while this job runs, but its "
            f"script trains in mode {mode.name}, which needs a fixed number of them; expected the mode async "
            "or half_async as the job's spec.syncMode says, or a job whose spec.syncMode is the script's mode"
        )
    if num_trainers > max_trainers:
        raise ConfigurationError(
            f"the job has {num_trainers} trainers (PADDLE_TRAINERS_NUM) and FLEET_MAX_TRAINERS is "
            f"{max_trainers}; expected at most that many"
        )
    return {_FACT: f"up to {max_trainers}"}
