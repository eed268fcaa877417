"""What failed under torchrun, found in the end of a log, whose last line is a rule of ``=`` signs.

torchrun ends with a summary of the ranks that failed. The exception of the one that failed first stands in
it where the script's ``main`` is decorated with ``record``; otherwise it stands above, if the end of the log
reaches so far.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["find_root_cause"]

_ROOT = "Root Cause (first observed failure):"
_RULE = re.compile(r"={20,}")
_RANK = re.compile(r"\s*rank +: (\d+) \(local_rank: (\d+)\)", re.ASCII)
_EXIT_CODE = re.compile(r"\s*exitcode +: (-?\d+) ", re.ASCII)
_SIGNAL = re.compile(r"\s*traceback : (Signal \d+ .*)", re.ASCII)
_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"(\[(?:rank|default)\d+\]:) ?", re.ASCII)  # of torch's own hook, and of torchrun --tee
_EXCEPTION = re.compile(r" {0,2}(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?")
_OWN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"


def find_root_cause(message: str) -> str:
    """Return the sentence for what failed first under torchrun; empty if the log is not torchrun's."""
    lines = message.rstrip().splitlines()
    if not lines or not _RULE.fullmatch(lines[-1]):
        return ""
    start = max((number for number, line in enumerate(lines) if line.strip() == _ROOT), default=-1)
    if start < 0:  # the summary is longer than what is left of the log
        return next(reversed([said for _, said in _exceptions(lines)]), "")
    above, root = lines[:start], lines[start:-1]
    rank, local_rank = _first(_RANK, root) or ("", "")
    who = f"rank {rank}: " if rank else ""
    said = [told for _, told in _exceptions(root)] or [told for (told,) in _all(_SIGNAL, root)]
    if not said:
        found = list(_exceptions(above))
        own = (f"[rank{rank}]:", f"[default{local_rank}]:")
        said = [told for prefix, told in found if prefix in own] or [told for _, told in found]
    if said:
        return who + said[-1]
    (code,) = _first(_EXIT_CODE, root) or ("?",)
    return (
        f"{who}exit code {code}; its exception stands in the log above torchrun's summary, and here too if"
        " main() is decorated with torch.distributed.elastic.multiprocessing.errors.record"
    )


def _exceptions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the line that names the exception of each traceback, after the prefix of its rank.

    It is the first one after a traceback's head that is indented no deeper. Before the first head, which may
    have been cut off, an exception is known by its name.
    """
    indents: dict[str, int] = {}  # of the traceback that each rank is writing
    headless = True
    for line in lines:
        match = _PREFIX.match(line)
        prefix, text = (match[1], line[match.end() :]) if match else ("", line)
        bare = text.strip()
        indent = len(text) - len(text.lstrip())
        if bare.endswith(_TRACEBACK):
            headless = False
            indents[prefix] = 2 if bare != _TRACEBACK else indent  # in the summary it follows its name
        elif (prefix in indents and indent <= indents[prefix] and bare) or (
            headless and _EXCEPTION.fullmatch(text)
        ):
            indents.pop(prefix, None)
            if not bare.startswith(_OWN):
                yield prefix, bare


def _all(pattern: re.Pattern[str], lines: Sequence[str]) -> list[tuple[str, ...]]:
    return [match.groups() for line in lines if (match := pattern.match(line))]


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> tuple[str, ...] | None:
    return next(iter(_all(pattern, lines)), None)
