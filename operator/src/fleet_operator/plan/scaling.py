"""trainer.replicas while a job is there: what another number of trainers means."""

from __future__ import annotations

from fleet_operator.plan.indexes import format_indexes

__all__ = [
    "is_resized",
    "joined_sentence",
    "noted_sentence",
    "scaled_sentence",
    "too_late_sentence",
    "trainers_to_have",
]


def is_resized(*, before: int, wanted: int) -> bool:
    """Whether another number of trainers is wanted than a status was last written for; 0 is a new job."""
    return before not in (0, wanted)


def trainers_to_have(*, asked: int, before: int, any_completed: bool) -> int:
    """Return how many trainers an elastic job has when so many are asked for and it had so many before.

    Once one has completed, the others are about to: who joined then would find no servers, and nothing to do.
    """
    return min(asked, before) if any_completed and before else asked


def scaled_sentence(*, before: int, wanted: int) -> str:
    """Say what follows from another number of trainers where all of them must know it."""
    return f"trainer.replicas was {before} and is {wanted}: all replicas start anew with that number"


def noted_sentence(*, before: int, wanted: int) -> str:
    """Say what follows from another number of trainers where nothing runs."""
    return f"trainer.replicas was {before} and is {wanted}: the job starts with that number"


def joined_sentence(*, before: int, wanted: int) -> str:
    """Say what follows from another number of trainers in an elastic job."""
    changed = range(min(before, wanted), max(before, wanted))
    verb = "join" if wanted > before else "leave"
    who = (
        f"trainer {changed[0]} {verb}s" if len(changed) == 1 else f"trainers {format_indexes(changed)} {verb}"
    )
    return f"trainer.replicas was {before} and is {wanted}: {who} the others, which go on"


def too_late_sentence(*, asked: int, had: int) -> str:
    """Say why an elastic job has fewer trainers than it was asked for; empty if it has them all."""
    if asked <= had:
        return ""
    return f"; trainer.replicas is {asked}, but a trainer has completed, and none is added after that"
