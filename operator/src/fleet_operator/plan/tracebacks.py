"""The exceptions in the end of a log: the line of each traceback that names one, without its rank's prefix.

It is the first line after a traceback's head that is indented no deeper. Where the head may have been cut
off, an exception is known by its name and by what stands above it. What Python passes over as it ends, the
errors of destructors say, is no cause of anything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PASSED_OVER", "exceptions", "last_exception", "last_place", "last_traceback", "without_rank"]

_HEAD = "Traceback (most recent call last):"
_PREFIX = re.compile(r"(\[(?:rank|default)\d+\]:) ?", re.ASCII)  # of torch's own hook, and of torchrun --tee
_NAMED = re.compile(r"[^\W\d][\w.<>]*(?::.*)?")
_EXCEPTION = re.compile(r" {0,2}(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?")
PASSED_OVER = ("Exception ignored in", "Error in atexit._run_exitfuncs")
"""How Python begins to tell of errors that it passes over as it ends."""

_FRAME = re.compile(r" *File \"(.+)\", line (\d+)(?:, in .*)?", re.ASCII)
_MOST_AFTER = 40
"""Lines that a process may still say after its traceback; one further above was caught, and logged."""
_OWN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"


def exceptions(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each line that names an exception, the prefix of its rank, and what it says."""
    indents: dict[str, int] = {}  # of the traceback that each rank is writing
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
    """Return what the last traceback says, if few lines follow it; else nothing."""
    number, _, said = max(exceptions(lines), default=(0, "", ""))
    return said if len(lines) - number <= _MOST_AFTER else ""


def last_place(lines: Sequence[str]) -> str:
    """Return where the exception of the last traceback was raised, as ``file:line``, if the lines say so."""
    frames = (match for line in last_traceback(lines) if (match := _FRAME.fullmatch(line)) is not None)
    return next((f"{frame[1]}:{frame[2]}" for frame in reversed(list(frames))), "")


def last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the lines of the last traceback, or of what is left of it, without the prefix of their rank."""
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
    """Return lines without the prefixes of the ranks that wrote them."""
    return "\n".join(_split(line)[1] for line in text.splitlines())


def _split(line: str) -> tuple[str, str]:
    match = _PREFIX.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
