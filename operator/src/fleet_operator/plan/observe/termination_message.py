"""Parses a pod's final message, which is its termination message or the end of its log.

``fleet`` writes the message, but any other program in a pod may write one, so invalid messages are ignored. A
replica that succeeded leaves a line of JSON. Its ``completedTrainers``, such as ``0-2,4``, are the trainers
that it knows to have completed. A server adds ``completedAfter``, such as ``{"0": "0-2", "1": "4"}``, which
lists the trainers by the number of restarts after which they completed. A failed replica leaves a sentence in
which ``(not joined)``, ``(joined, no step made)`` or ``(joined)`` follows its name.

*Tracebacks.* An exception's line is the first line after a traceback's head that is indented no deeper. If
the head may be cut off, an exception is recognized by its name and the line above it. Errors that Python
ignores at its end, such as those of destructors, are not causes.

*torchrun* ends with a summary of the failed ranks, whose last line consists of ``=`` signs. The summary has
the exception of the rank that failed first if the script's ``main`` is decorated with ``record``. Otherwise
the exception is above the summary, if the end of the log reaches that far back.

*Permanent errors* recur at every start of a replica. There are few of them, and they are recognized by the
very last line: the script or one of its imports cannot be found or parsed, or the script reads standard
input, which no replica has. No other error is permanent after a single end: a name that cannot be resolved,
an unresponsive peer or a full disk may recover within a minute. A run on one machine, which a person watches,
also ends after the second exception of the same kind at the same line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fleet_operator.plan.formats import parse_any_indexes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fleet_operator.api import LastFailure

__all__ = [
    "PASSED_OVER",
    "LastWords",
    "exceptions",
    "find_root_cause",
    "is_repeated",
    "last_exception",
    "last_place",
    "last_sentence",
    "last_traceback",
    "parse_words",
    "permanent_error",
    "raised_at",
    "without_rank",
]

_HEAD = "Traceback (most recent call last):"
_PREFIX = re.compile(
    r"(\[(?:rank|default)\d+\]:) ?", re.ASCII
)  # the prefixes of torch's exception hook, and of torchrun --tee
_NAMED = re.compile(r"[^\W\d][\w.<>]*(?::.*)?")
_EXCEPTION = re.compile(r" {0,2}(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?")
PASSED_OVER = ("Exception ignored in", "Error in atexit._run_exitfuncs")
"""The beginnings of Python's messages about errors that it ignores at exit."""

_FRAME = re.compile(r" *File \"(.+)\", line (\d+)(?:, in .*)?", re.ASCII)
_MOST_AFTER = 40
"""How many lines may follow the last traceback; if more do, the exception was caught and logged."""

_OWN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"

_ROOT = "Root Cause (first observed failure):"
_RULE = re.compile(r"={20,}")
_RANK = re.compile(r"\s*rank +: (\d+) \(local_rank: (\d+)\)", re.ASCII)
_EXIT_CODE = re.compile(r"\s*exitcode +: (-?\d+) ", re.ASCII)
_SIGNAL = re.compile(r"\s*traceback : (Signal \d+ .*)", re.ASCII)
_ABORTED = "Signal 6 "  # SIGABRT, often from threads that remain after an exception

MOST_TRAINERS = 1000
"""The limit of parsed trainer indexes; all indexes of a valid job are below it."""

_SENTENCE_CHARACTERS = 300

_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_FAILED = re.compile(r"(?:trainer|pserver) \d+ \((?P<not>not )?joined(?P<idle>, no step made)?\): ", re.ASCII)

_SENTENCE_OF_FLEET = re.compile(
    r"(?:trainer|pserver|worker|server) \d+(?:: | \(| failed with | was )", re.ASCII
)
"""The beginning of a sentence in which `fleet` reports the cause; the lines above it are only log lines."""

NEVER_RAN = frozenset({"ContainerCannotRun", "StartError"})
"""The reasons of a container whose command could not be started."""

_OF_WHOM = re.compile(
    r"\A(?:rank|(?:worker|server) \d+ (?:failed with exit status|was ended by signal)) \d+: "
)
"""The beginning of a report by torchrun or a launcher of `fleet`, which names a pod's failed process."""

_PERMANENT_EXCEPTION = re.compile(
    r"((?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError): .+"
    r"|EOFError: EOF when reading a line\b.*)"
)
_INTERPRETER = re.compile(
    r"\S*python[\d.]*: ((?:can't open file|can't find '__main__' module in|No module named"
    r"|Error while finding module specification for) .+)"
)
_SHELL = re.compile(r"(.+: (?:(?:command )?not found|No such file or directory|Permission denied))")
_CONTAINER_RUNTIME = re.compile(
    r"(?:exec:? \"?|cannot start ')(.+?['\"]?: (?:stat \S+: )?(?:executable file not found"
    r"|no such file or directory|not a directory|permission denied|exec format error))",
    re.IGNORECASE,
)
_BY_EXIT_CODE = {
    1: (_PERMANENT_EXCEPTION, _INTERPRETER),
    2: (_INTERPRETER,),
    126: (_SHELL,),
    127: (_SHELL,),
    134: (_PERMANENT_EXCEPTION,),  # SIGABRT: it ends threads that remain after an exception
}
_AFTERTHOUGHT = re.compile(r"\s.*|\[?[IWEF]\d{4} .*|\S+:\d+: \w*Warning: .*|terminate called .*|")
"""Lines that a process or torch's C++ code prints after a final exception; indented ones continue others."""

_EXCEPTION_OF_FLEET = re.compile(r"\w+ \d+ (?:\([\w, ]+\))?: (?P<said>.*) \(at (?P<place>.+:\d+)\)", re.ASCII)
"""An exception in `fleet`'s format: the replica, its stage, the error and its location."""

_OF_CONNECTIONS = re.compile(
    r"connect|timed? ?out|unreachable|no route to host|broken ?pipe|address already in use|gaierror"
    r"|HTTP Error|incomplete ?read|\bssl\.\w+Error|RpcError|\bDist\w+Error",
    re.IGNORECASE,
)
_FILE = re.compile(r"^ *File \"(.+)\", line \d+", re.MULTILINE)
_UNNAMED_FILE = re.compile(r"\(<\w+>, line \d+\)")


def exceptions(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield each exception in a log with its line number and its rank prefix."""
    indents: dict[str, int] = {}  # the indentation of each rank's current traceback
    headless, above = True, ""
    for number, line in enumerate(lines):
        prefix, text = _split(line)
        bare = text.strip()
        indent = _indent(text)
        if bare.endswith(_HEAD):
            headless = False
            if above.startswith(PASSED_OVER):
                continue
            indents[prefix] = 2 if bare != _HEAD else indent  # in torchrun's summary it follows its name
        elif (prefix in indents and indent <= indents[prefix] and _NAMED.fullmatch(bare)) or (
            headless and _indent(above) > indent and _EXCEPTION.fullmatch(text)
        ):
            indents.pop(prefix, None)
            if not bare.startswith(_OWN):
                yield number, prefix, bare
        above = text


def last_exception(lines: Sequence[str]) -> str:
    """Return the exception of the last traceback, or an empty string if too much output follows it."""
    number, _, said = max(exceptions(lines), default=(0, "", ""))
    return said if len(lines) - number <= _MOST_AFTER else ""


def last_place(lines: Sequence[str]) -> str:
    """Return where the exception of the last traceback was raised, as ``file:line``, or an empty string."""
    frames = (match for line in last_traceback(lines) if (match := _FRAME.fullmatch(line)) is not None)
    return next((f"{frame[1]}:{frame[2]}" for frame in reversed(list(frames))), "")


def last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the available lines of the last traceback, without rank prefixes."""
    number, prefix, _ = max(exceptions(lines), default=(-1, "", ""))
    found: list[str] = []
    for line in reversed(lines[: number + 1]):
        above, text = _split(line)
        if above == prefix:
            found.append(text)
            if text.strip().endswith(_HEAD):
                break
    return found[::-1]


def without_rank(text: str) -> str:
    """Return a text with the rank prefix of each line removed."""
    return "\n".join(_split(line)[1] for line in text.splitlines())


def _split(line: str) -> tuple[str, str]:
    match = _PREFIX.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def find_root_cause(message: str) -> str:
    """Return a sentence about the first failure that torchrun reports, or an empty string for other logs."""
    lines = message.rstrip().splitlines()
    if not lines or not _RULE.fullmatch(lines[-1]):
        return ""
    start = max((number for number, line in enumerate(lines) if line.strip() == _ROOT), default=-1)
    if start < 0:  # the end of the log begins within the summary
        return max(exceptions(lines), default=(0, "", ""))[2]
    above, root = lines[:start], lines[start:-1]
    rank, local_rank = _first(_RANK, root) or ("", "")
    who = f"rank {rank}: " if rank else ""
    found = list(exceptions(above))
    own = (f"[rank{rank}]:", f"[default{local_rank}]:")
    signals = [message for (message,) in _all(_SIGNAL, root)]
    said = (
        [message for _, _, message in exceptions(root)]
        or [message for _, prefix, message in found if prefix in own]
        or [message for message in signals if not message.startswith(_ABORTED)]
        or [message for _, _, message in found]
        or signals
    )
    if said:
        return who + said[-1]
    (code,) = _first(_EXIT_CODE, root) or ("?",)
    return (
        f"{who}exit code {code}; its exception is in the log above torchrun's summary, and here too if"
        " main() is decorated with torch.distributed.elastic.multiprocessing.errors.record"
    )


def _all(pattern: re.Pattern[str], lines: Sequence[str]) -> list[tuple[str, ...]]:
    return [match.groups() for line in lines if (match := pattern.match(line))]


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> tuple[str, ...] | None:
    return next(iter(_all(pattern, lines)), None)


@dataclass(frozen=True, slots=True)
class LastWords:
    """A parsed termination message.

    Attributes
    ----------
    joined : bool, optional
        Whether the replica had joined its job; None without a runtime.
    completed : frozenset of int
        The trainers that the replica knows to have completed.
    restarts : mapping of int to int
        The restart count of each completed trainer, as far as known.
    stepped : bool, optional
        Whether a failed replica had made a step; None without a runtime.
    """

    joined: bool | None = None
    completed: frozenset[int] = frozenset()
    restarts: Mapping[int, int] = field(default_factory=dict)
    stepped: bool | None = None


def parse_words(message: str | None) -> LastWords:
    """Parse a termination message; an invalid one gives `LastWords` without information."""
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
    """Return the error in a message in readable form, or an empty string if there is no error.

    This is the exception of the last traceback or the error in torchrun's summary, or else the last line.

    Parameters
    ----------
    message : str, optional
        A termination message.
    with_place : bool
        Whether to add the file and line of an exception.
    """
    text = (message or "").strip()
    document = _document(text)
    if isinstance(document.get("joined"), bool) or document.keys() >= {"role", "step"}:
        return ""  # a progress report, which a replica writes when it is about to succeed
    last = without_rank(text.rpartition("\n")[2]).strip()
    lines = text.splitlines()
    exception = "" if _SENTENCE_OF_FLEET.match(last) else last_exception(lines)
    if exception and with_place and (place := last_place(lines)):
        exception = f"{exception[: _SENTENCE_CHARACTERS - len(place) - 6]} (at {place})"
    said = find_root_cause(text) or exception or last
    return _FAILED.sub("", said, count=1)[:_SENTENCE_CHARACTERS]


def permanent_error(exit_code: int | None, reason: str | None, message: str | None) -> str | None:
    """Return a replica's permanent error, or None if a retry might succeed.

    Parameters
    ----------
    exit_code : int, optional
        The main container's exit code.
    reason : str, optional
        The main container's reason, such as ``Error``.
    message : str, optional
        Its termination message, or the end of its log.
    """
    text = (message or "").strip()
    if reason in NEVER_RAN:
        found = _CONTAINER_RUNTIME.search(text)
        return found[1] if found else None
    said = _OF_WHOM.sub("", last_sentence(text), count=1)
    matches = (pattern.fullmatch(said) for pattern in _BY_EXIT_CODE.get(exit_code or 0, ()))
    error = next((match[1] for match in matches if match), None)
    if error is None or _is_of_data(error, text) or _went_on(error, text):
        return None
    return error


def is_repeated(error: str, exit_code: int | None, before: LastFailure | None) -> bool:
    """Return whether the previous failure had the same exit code and error."""
    if before is None or before.exit_code != exit_code:
        return False
    return permanent_error(before.exit_code, before.reason, before.termination_message) == error


def raised_at(message: str | None) -> str | None:
    """Return an uncaught exception's type and location, as ``ValueError at train.py:12``.

    None without an exception or a place, and for connection errors, because a retry may reach the peer.
    """
    lines = (message or "").strip().splitlines()
    match = _EXCEPTION_OF_FLEET.fullmatch(lines[-1]) if lines else None
    said, place = match.group("said", "place") if match else (last_exception(lines), last_place(lines))
    if not said or not place or _OF_CONNECTIONS.search(said):
        return None
    return f"{said.partition(':')[0]} at {place}"


def _is_of_data(error: str, text: str) -> bool:
    """Return whether a syntax error concerns data that the script parsed with eval or ast.literal_eval."""
    if not error.startswith("SyntaxError"):
        return False
    text = without_rank(text)
    files = _FILE.findall(text)
    called = text.startswith("Traceback") or "\nTraceback" in text  # python -c shows no traceback
    return bool(_UNNAMED_FILE.search(error) or (called and files and files[-1].startswith("<")))


def _went_on(error: str, text: str) -> bool:
    """Return whether the script continued after an exception, judged by the subsequent output."""
    if find_root_cause(text):
        return False
    log, _, sentence = text.rpartition("\n")
    _, found, after = without_rank(log if _OF_WHOM.match(sentence) else text).rpartition(error)
    more = takewhile(lambda line: not line.startswith(PASSED_OVER), after.splitlines()[1:])
    return bool(found) and not all(_AFTERTHOUGHT.fullmatch(line) for line in more)
