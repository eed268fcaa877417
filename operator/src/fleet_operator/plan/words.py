"""What a pod says as it ends: its termination message, as far as a plan needs it.

``fleet`` writes it, and so may anything else that runs in a pod: what is odd says nothing. One that ended
well leaves a line of JSON, whose ``completedTrainers`` are those that it knows to have completed, ``0-2,4``;
a server says also after how many restarts each did, ``completedAfter``, ``{"0": "0-2", "1": "4"}``. One that
failed leaves a sentence, in which ``(not joined)``, ``(joined, no step made)`` or ``(joined)`` follows its
name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleet_operator.plan.indexes import parse_any_indexes
from fleet_operator.plan.torchrun import find_root_cause
from fleet_operator.plan.tracebacks import last_exception, last_place, without_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LastWords", "last_sentence", "parse_words"]

MOST_TRAINERS = 1000
"""More than a role may have."""

_SENTENCE_CHARACTERS = 300

_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_FAILED = re.compile(r"(?:trainer|pserver) \d+ \((?P<not>not )?joined(?P<idle>, no step made)?\): ", re.ASCII)

_OF_FLEET = re.compile(r"(?:trainer|pserver|worker|server) \d+(?:: | \(| failed with | was )", re.ASCII)
"""How a sentence of `fleet` begins, which has been found with care: what stands above is only its log."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a replica has said.

    Attributes
    ----------
    joined : bool, optional
        Whether it had joined its job; None where no runtime said.
    completed : frozenset of int
        Trainers that it knows to have completed.
    restarts : mapping of int to int
        How often they had been started before, as far as it says.
    stepped : bool, optional
        Of one that failed, whether it had made a step of the training before; None where no runtime said.
    """

    joined: bool | None = None
    completed: frozenset[int] = frozenset()
    restarts: Mapping[int, int] = field(default_factory=dict)
    stepped: bool | None = None


def parse_words(message: str | None) -> LastWords:
    """Read a termination message; whatever it is, this is no error."""
    text = (message or "").strip()
    if (failed := _FAILED.match(text)) is not None:
        has_joined = failed["not"] is None
        return LastWords(has_joined, stepped=has_joined and failed["idle"] is None)
    document = _document(text)
    if not isinstance(joined := document.get("joined"), bool):
        return LastWords()
    completed = parse_any_indexes(document.get("completedTrainers"), below=MOST_TRAINERS)
    return LastWords(joined, completed, _parse_restarts(document.get("completedAfter")))


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _parse_restarts(after: object) -> dict[int, int]:
    if not isinstance(after, dict):
        return {}
    return {
        trainer: int(restarts)
        for restarts, trainers in after.items()
        if _COUNT.fullmatch(restarts)
        for trainer in parse_any_indexes(trainers, below=MOST_TRAINERS)
    }


def last_sentence(message: str | None, *, with_place: bool = False) -> str:
    """Return what a person is told of a message; empty if it tells of no error.

    That is the exception of its last traceback, or what torchrun's summary has to say; else its last line.

    Parameters
    ----------
    message : str, optional
        A termination message.
    with_place : bool
        Whether to say behind the exception of a traceback in which line of which file it was raised.
    """
    text = (message or "").strip()
    document = _document(text)
    if isinstance(document.get("joined"), bool) or document.keys() >= {"role", "step"}:
        return ""  # the progress of one that was about to end well
    last = without_rank(text.rpartition("\n")[2]).strip()
    lines = text.splitlines()
    exception = "" if _OF_FLEET.match(last) else last_exception(lines)
    if exception and with_place and (place := last_place(lines)):
        exception = f"{exception[: _SENTENCE_CHARACTERS - len(place) - 6]} (at {place})"
    said = find_root_cause(text) or exception or last
    return _FAILED.sub("", said, count=1)[:_SENTENCE_CHARACTERS]
