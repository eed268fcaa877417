"""What becomes of fields that the API server does not know, in what a job's author wrote.

A job that this version was the first to look at is refused for them: they are typing errors, and a limit or
a volume would be missing without a word. One that ran before that runs on, with a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.plan.model import Event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.cluster.interface import Key

__all__ = ["WARN", "UnknownFields"]

WARN = "Warn"


class UnknownFields:
    """Knows of which unknown fields people have been told, so that each is told once, not for each pod."""

    def __init__(self) -> None:
        self._told: dict[Key, set[str]] = {}

    def tell(self, key: Key, shown: str, warnings: Iterable[str]) -> Event | None:
        """Return what to tell of an object that was created, if it is anything new.

        Parameters
        ----------
        key : Key
            The job.
        shown : str
            The object, as ``Kind name``.
        warnings : iterable of str
            What the API server said about it; whatever is not about fields is nothing new.
        """
        told = self._told.get(key, set())
        about = dict.fromkeys(
            each for each in warnings if each.startswith(("unknown field", "duplicate field"))
        )
        news = [each for each in about if each not in told]
        if not news:
            return None
        self._told[key] = told.union(news)
        sentence = (
            f"{shown}: {', '.join(news)}: the API server leaves out what it does not know, and this job"
            " runs on without it; a new job with this template is refused"
        )
        return Event("Warning", "UnknownFields", sentence)

    def forget(self, key: Key) -> None:
        """Know nothing of a job any more."""
        self._told.pop(key, None)
