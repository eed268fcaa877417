"""Success policy: which trainers must have succeeded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.api import SuccessPolicy
from fleet_operator.plan.indexes import format_indexes

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["is_satisfied", "success_sentence"]


def is_satisfied(policy: SuccessPolicy, *, replicas: int, succeeded: Collection[int]) -> bool:
    """Whether enough trainers, given by index, have succeeded. Parameter servers have no vote."""
    return {
        SuccessPolicy.ALL: len(succeeded) == replicas,
        SuccessPolicy.ANY: len(succeeded) > 0,
        SuccessPolicy.RANK_ZERO: 0 in succeeded,
    }[policy]


def success_sentence(
    policy: SuccessPolicy, *, replicas: int, succeeded: Collection[int], late: Collection[int] = ()
) -> str:
    """Say why the job has succeeded, and which trainers came too late to take part."""
    sentence = _success_sentence(policy, replicas=replicas, succeeded=succeeded)
    if not late:
        return sentence
    who = f"trainers {format_indexes(late)}" if len(late) > 1 else f"trainer {min(late)}"
    return f"{sentence}; {who} came too late to take part"


def _success_sentence(policy: SuccessPolicy, *, replicas: int, succeeded: Collection[int]) -> str:
    if policy is SuccessPolicy.RANK_ZERO:
        return "trainer 0 has completed, as successPolicy RankZero asks"
    if policy is SuccessPolicy.ANY:
        return f"trainer {min(succeeded)} has completed, as successPolicy Any asks"
    return "the trainer has completed" if replicas == 1 else f"all {replicas} trainers have completed"
