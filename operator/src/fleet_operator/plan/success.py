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
    policy: SuccessPolicy,
    *,
    replicas: int,
    succeeded: Collection[int],
    late: Collection[int] = (),
    non_finite: Collection[int] = (),
) -> str:
    """Say why the job has succeeded, and what is to be known of it.

    Parameters
    ----------
    policy : SuccessPolicy
    replicas : int
        How many trainers the job has.
    succeeded : collection of int
        Those that have completed, by index.
    late : collection of int
        Those that came too late to take part.
    non_finite : collection of int
        Those whose weights hold NaN or infinity at the end.
    """
    sentence = _success_sentence(policy, replicas=replicas, succeeded=succeeded)
    if late:
        sentence += f"; {_trainers(late)} came too late to take part"
    if non_finite:
        sentence += f"; but {_trainers(non_finite)} ended with NaN or infinity in the weights"
    return sentence


def _trainers(indexes: Collection[int]) -> str:
    return f"trainers {format_indexes(indexes)}" if len(indexes) > 1 else f"trainer {min(indexes)}"


def _success_sentence(policy: SuccessPolicy, *, replicas: int, succeeded: Collection[int]) -> str:
    if policy is SuccessPolicy.RANK_ZERO:
        return "trainer 0 has completed, as successPolicy RankZero asks"
    if policy is SuccessPolicy.ANY:
        return f"trainer {min(succeeded)} has completed, as successPolicy Any asks"
    return "the trainer has completed" if replicas == 1 else f"all {replicas} trainers have completed"
