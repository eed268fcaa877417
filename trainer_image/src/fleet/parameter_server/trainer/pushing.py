"""Values that a script has written to parameters become the servers' own: ``fleet.push_parameters()``.

They travel beside the gradients' own way, block by block: who writes rarely needs no more. What the servers'
optimizers keep, momentum say, stays as it is, as it would in one process.
"""

import logging
from collections.abc import Callable

import numpy as np

from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.trainer.client import Client
from fleet.parameter_server.transport.arena import bytes_of

__all__ = ["push_alone", "push_together"]

_log = logging.getLogger(__name__)
CALL = "fleet.push_parameters"


def push_together(client: Client) -> None:
    """Make the first trainer's values everybody's; every trainer that has not completed calls this."""
    plan, store = client.session.plan, client.session.store
    held = store.checksums()
    own = np.array([held[block.id] for block in plan.blocks] + [plan.trainer_id], dtype=np.int64)
    most, least = np.frombuffer(
        client.barriers.reduce(Contribution.of(np.stack([own, -own]), "max"), CALL), dtype=np.int64
    ).reshape(2, -1)
    first, unequal = -int(least[-1]), most[:-1] != -least[:-1]
    if first == plan.trainer_id:
        _write(client, store.value_bytes)
    client.barriers.barrier()
    if not unequal.any():
        store.keep()
        return
    names = sorted({block.param for block, other in zip(plan.blocks, unequal, strict=True) if other})
    _log.warning(
        "%s(): the trainers have written different values to %s%s; those of trainer %d are everybody's now",
        CALL,
        ", ".join(names[:3]),
        " …" if len(names) > 3 else "",
        first,
    )
    client.take_values()


def push_alone(client: Client, settle: Callable[[], None]) -> None:
    """Overwrite what the servers hold by this trainer's values; the others get them with their next ones.

    Parameters
    ----------
    client : Client
    settle : callable
        Lets the servers have all of the steps made so far, which may bring values from before.
    """
    store = client.session.store
    written = {name: value.detach().cpu().contiguous().clone() for name, value in store.parameters.items()}
    store.forget()
    settle()
    by_id = {block.id: block for block in client.session.plan.blocks}

    def value_of(number: int) -> memoryview:
        block, value = by_id[number], written[by_id[number].param]
        size = value.element_size()
        return bytes_of(value)[block.begin * size : block.end * size]

    _write(client, value_of)
    client.take_values()


def _write(client: Client, value_of: Callable[[int], memoryview]) -> None:
    for block in client.session.plan.blocks:
        value = value_of(block.id)
        client.calls.ask(block.server, lambda control, seconds: control.write(block.id, value, seconds))  # noqa: B023
