"""Facts, besides those in the plan, that all processes of a job must agree on.

The number of trainers in an elastic job may change while the job runs, and a replica knows only the number at
its own start. The processes must therefore agree on the maximum instead (``FLEET_MAX_TRAINERS``).
"""

from collections.abc import Mapping
from typing import Any, Final

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes import Mode
from fleet.plan import Source

__all__ = ["INITIAL_STATE", "elastic_facts", "initial_state_fact", "state_of"]

INITIAL_STATE: Final = "state of the optimizer before the first step"
_TRAINERS: Final = "trainers"
"""The name under which a program's agreement lists the number of trainers."""


def elastic_facts(mode: Mode, num_trainers: int, max_trainers: int | None) -> dict[str, str]:
    """Return the fact that replaces the number of trainers in the agreement of an elastic job.

    Parameters
    ----------
    mode : Mode
    num_trainers : int
        The number of trainers at the start of this process.
    max_trainers : int or None
        The maximum number of trainers; if the job is not elastic, None, and the result is empty.

    Raises
    ------
    ConfigurationError
        The mode requires a fixed number of trainers, or there are more trainers than the maximum.
    """
    if max_trainers is None:
        return {}
    if not mode.elastic:
        raise ConfigurationError(
            f"FLEET_MAX_TRAINERS is {max_trainers}, so trainers may join and leave while this job runs, but "
            f"its script trains in mode {mode.name}, which needs a fixed number of them; expected a script "
            "that trains in mode async or half_async, or a job without trainer.minReplicas and "
            "trainer.maxReplicas"
        )
    if num_trainers > max_trainers:
        raise ConfigurationError(
            f"the job has {num_trainers} trainers (PADDLE_TRAINERS_NUM) and FLEET_MAX_TRAINERS is "
            f"{max_trainers}; expected at most that many"
        )
    return {_TRAINERS: f"up to {max_trainers}"}


def state_of(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the state of this process's optimizer, by parameter name."""
    return {name: source.optimizer.state.get(parameter, {}) for name, parameter in source.parameters.items()}


def initial_state_fact(state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the fact that the script loaded optimizer state before training, or {} if it did not."""
    count = sum(1 for entries in state.values() if entries)
    return {INITIAL_STATE: f"of {count} parameters"} if count else {}
