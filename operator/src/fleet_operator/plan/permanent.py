"""Ends that would be the same however often a replica were started: its script cannot so much as run.

They are few, and known by the very last words: the script, or what it imports, cannot be found or parsed, or
it asks a person on standard input, which no replica has. Nothing else is judged so by one end alone: a name
that cannot be resolved, a peer that does not answer or a full disk may be better a minute later. A run on one
machine, before which a person sits, also ends by the second exception of the same kind at the same line.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING

from fleet_operator.plan.torchrun import find_root_cause
from fleet_operator.plan.tracebacks import PASSED_OVER, last_exception, last_place, without_rank
from fleet_operator.plan.words import last_sentence

if TYPE_CHECKING:
    from fleet_operator.api import LastFailure

__all__ = ["is_repeated", "permanent_error", "raised_at"]

NEVER_RAN = frozenset({"ContainerCannotRun", "StartError"})
"""Reasons of a container whose command could not be started."""

_OF_WHOM = re.compile(
    r"\A(?:rank|(?:worker|server) \d+ (?:failed with exit status|was ended by signal)) \d+: "
)
"""Who of a pod's processes has failed, as torchrun's summary or a launcher of `fleet` tells it."""

_EXCEPTION = re.compile(
    r"((?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError): .+"
    r"|EOFError: EOF when reading a line\b.*)"
)
_INTERPRETER = re.compile(
    r"\S*python[\d.]*: ((?:can't open file|can't find '__main__' module in|No module named"
    r"|Error while finding module specification for) .+)"
)
_SHELL = re.compile(r"(.+: (?:(?:command )?not found|No such file or directory|Permission denied))")
_RUNTIME = re.compile(
    r"(?:exec:? \"?|cannot start ')(.+?['\"]?: (?:stat \S+: )?(?:executable file not found"
    r"|no such file or directory|not a directory|permission denied|exec format error))",
    re.IGNORECASE,
)
_BY_EXIT_CODE = {
    1: (_EXCEPTION, _INTERPRETER),
    2: (_INTERPRETER,),
    126: (_SHELL,),
    127: (_SHELL,),
    134: (_EXCEPTION,),  # SIGABRT: an exception left threads behind, which ended so
}
_AFTERTHOUGHT = re.compile(r"\s.*|\[?[IWEF]\d{4} .*|\S+:\d+: \w*Warning: .*|terminate called .*|")
"""What a process, and torch's C++, may still say as it ends; a line further in belongs to the one above."""
_OF_FLEET = re.compile(r"\w+ \d+ (?:\([\w, ]+\))?: (?P<said>.*) \(at (?P<place>.+:\d+)\)", re.ASCII)
"""An exception in the words of `fleet`: who, how far it had come, what and where."""
_OF_CONNECTIONS = re.compile(
    r"connect|timed? ?out|unreachable|gaierror|RpcError|\bDist\w+Error", re.IGNORECASE
)
_FILE = re.compile(r"^ *File \"(.+)\", line \d+", re.MULTILINE)
_UNNAMED_FILE = re.compile(r"\(<\w+>, line \d+\)")


def permanent_error(exit_code: int | None, reason: str | None, message: str | None) -> str | None:
    """Return the error that would end a replica's every life alike, or None if the next may go better.

    Parameters
    ----------
    exit_code : int, optional
        The main container's.
    reason : str, optional
        The main container's, such as ``Error``.
    message : str, optional
        What it said as it ended: its termination message, or the end of its log.
    """
    text = (message or "").strip()
    if reason in NEVER_RAN:
        found = _RUNTIME.search(text)
        return found[1] if found else None
    said = _OF_WHOM.sub("", last_sentence(text), count=1)
    matches = (pattern.fullmatch(said) for pattern in _BY_EXIT_CODE.get(exit_code or 0, ()))
    error = next((match[1] for match in matches if match), None)
    if error is None or _is_of_data(error, text) or _went_on(error, text):
        return None
    return error


def is_repeated(error: str, exit_code: int | None, before: LastFailure | None) -> bool:
    """Whether the failure before was the same: its exit code and its error."""
    if before is None or before.exit_code != exit_code:
        return False
    return permanent_error(before.exit_code, before.reason, before.termination_message) == error


def raised_at(message: str | None) -> str | None:
    """Return the kind of an uncaught exception and its place, as ``ValueError at train.py:12``.

    None where the last words name no exception or no place, and of an exception of connections: the next try
    may find the peer.
    """
    lines = (message or "").strip().splitlines()
    told = _OF_FLEET.fullmatch(lines[-1]) if lines else None
    said, place = told.group("said", "place") if told else (last_exception(lines), last_place(lines))
    if not said or not place or _OF_CONNECTIONS.search(said):
        return None
    return f"{said.partition(':')[0]} at {place}"


def _is_of_data(error: str, text: str) -> bool:
    """Whether a text that a script has read does not parse (eval, ast.literal_eval), and not the script."""
    if not error.startswith("SyntaxError"):
        return False
    text = without_rank(text)
    files = _FILE.findall(text)
    called = text.startswith("Traceback") or "\nTraceback" in text  # python -c has no traceback of its own
    return bool(_UNNAMED_FILE.search(error) or (called and files and files[-1].startswith("<")))


def _went_on(error: str, text: str) -> bool:
    """Whether the script had caught the error, and logged it: it has said more since."""
    if find_root_cause(text):
        return False
    log, _, sentence = text.rpartition("\n")
    _, found, after = without_rank(log if _OF_WHOM.match(sentence) else text).rpartition(error)
    more = takewhile(lambda line: not line.startswith(PASSED_OVER), after.splitlines()[1:])
    return bool(found) and not all(_AFTERTHOUGHT.fullmatch(line) for line in more)
