"""What a process's own optimizer holds before the first step, which all processes of a job must agree on."""

from collections.abc import Mapping
from typing import Any, Final

from fleet.plan import Source

__all__ = ["INITIAL_STATE", "initial_state_fact", "state_of"]

INITIAL_STATE: Final = "state of the optimizer before the first step"


def state_of(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return what this process's own optimizer has for the parameters, by name."""
    return {name: source.optimizer.state.get(parameter, {}) for name, parameter in source.parameters.items()}


def initial_state_fact(state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return what the processes of a job must have in common about state that was loaded into optimizers."""
    count = sum(1 for entries in state.values() if entries)
    return {INITIAL_STATE: f"of {count} parameters"} if count else {}
