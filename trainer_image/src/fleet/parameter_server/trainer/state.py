"""The optimizers' state, read from the servers and put together by parameter."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.parameter_server.control.checkpoints import join_states
from fleet.parameter_server.trainer.calls import ServerCalls
from fleet.plan.job import TrainerPlan

__all__ = ["read_state"]


def read_state(plan: TrainerPlan, calls: ServerCalls, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Fetch the optimizers' state from the servers.

    Parameters
    ----------
    plan : TrainerPlan
    calls : ServerCalls
    names : iterable of str
        The parameters.

    Returns
    -------
    dict
        Per parameter's name the entries that torch.optim has for it. An entry of the blocks' shapes gets the
        parameter's; of any other, as a count of steps, the first block's stands for all.
    """
    states = join_states(calls.optimizer_state())
    return {name: state for name in names if (state := _put_together(plan, name, states))}


def _put_together(plan: TrainerPlan, name: str, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    blocks = plan.blocks_of(name)
    state: dict[str, Any] = {}
    for entry, first in states[blocks[0].id].items():
        one_each = isinstance(first, Tensor) and first.shape == blocks[0].shape
        if one_each and blocks[0].param_shape:
            parts = [states[block.id][entry].view(-1) for block in blocks]
            state[entry] = torch.cat(parts).view(blocks[0].param_shape)
        else:
            state[entry] = first
    return state
