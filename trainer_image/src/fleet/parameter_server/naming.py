"""How sentences name several processes, and what they hold: short, however much there is."""

from collections.abc import Iterable, Sequence
from typing import Final

from fleet.plan.blocks import PlannedBlock

__all__ = ["describe_blocks", "name_servers", "name_trainers"]

_MOST: Final = 6
"""How many are named; of more than that, all but one less are counted."""


def name_trainers(trainers: Iterable[int]) -> str:
    """Return ``trainer 1``, or ``trainers 0 and 1``."""
    return _named("trainer", [str(trainer) for trainer in trainers])


def name_servers(endpoints: Iterable[str]) -> str:
    """Return ``parameter server A``, or ``parameter servers A and B``."""
    return _named("parameter server", list(endpoints))


def describe_blocks(blocks: Sequence[PlannedBlock]) -> str:
    """Return ``3 blocks of 2 parameters (5000 values)``."""
    names, parameters = {block.name for block in blocks}, {block.param for block in blocks}
    return (
        f"{len(names)} blocks of {len(parameters)} parameters ({sum(block.numel for block in blocks)} values)"
    )


def _named(kind: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{kind} {names[0]}"
    shown = list(names)
    if len(shown) > _MOST:
        shown[_MOST - 1 :] = [f"{len(shown) - _MOST + 1} more"]
    return f"{kind}s {', '.join(shown[:-1])} and {shown[-1]}"
