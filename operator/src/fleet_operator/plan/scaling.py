"""trainer.replicas while a job is there: what another number of trainers means."""

from __future__ import annotations

__all__ = ["is_resized", "scaled_sentence"]


def is_resized(*, before: int, wanted: int) -> bool:
    """Whether another number of trainers is wanted than a status was last written for; 0 is a new job."""
    return before not in (0, wanted)


def scaled_sentence(*, before: int, wanted: int) -> str:
    """Say what follows from another number of trainers."""
    return f"trainer.replicas was {before} and is {wanted}: all replicas start anew with that number"
