"""Pods that are being deleted: their names are taken until they are gone, and some never go by themselves."""

from __future__ import annotations

from datetime import datetime, timedelta

__all__ = ["PATIENCE", "given_up_at"]

PATIENCE = timedelta(seconds=30)


def given_up_at(grace_ends: datetime) -> datetime:
    """Return when a pod whose grace period ends then is deleted without waiting for its node's word.

    A kubelet kills at the end of the grace period; one that has not said so half a minute later is gone or
    cut off. Should the pod still run over there, its attempt in every frame keeps it out of the training.
    """
    return grace_ends + PATIENCE
