"""What failed under torchrun, found in the end of a log, whose last line is a rule of ``=`` signs.

torchrun ends with a summary of the ranks that failed. The exception of the one that failed first stands in
it where the script's ``main`` is decorated with ``record``; otherwise it stands above, if the end of the log
reaches so far.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet_operator.plan.tracebacks import exceptions

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["find_root_cause"]

_ROOT = "Root Cause (first observed failure):"
_RULE = re.compile(r"={20,}")
_RANK = re.compile(r"\s*rank +: (\d+) \(local_rank: (\d+)\)", re.ASCII)
_EXIT_CODE = re.compile(r"\s*exitcode +: (-?\d+) ", re.ASCII)
_SIGNAL = re.compile(r"\s*traceback : (Signal \d+ .*)", re.ASCII)
_ABORTED = "Signal 6 "  # often by threads that an exception left behind


def find_root_cause(message: str) -> str:
    """Return the sentence for what failed first under torchrun; empty if the log is not torchrun's."""
    lines = message.rstrip().splitlines()
    if not lines or not _RULE.fullmatch(lines[-1]):
        return ""
    start = max((number for number, line in enumerate(lines) if line.strip() == _ROOT), default=-1)
    if start < 0:  # the summary is longer than what is left of the log
        return max(exceptions(lines), default=(0, "", ""))[2]
    above, root = lines[:start], lines[start:-1]
    rank, local_rank = _first(_RANK, root) or ("", "")
    who = f"rank {rank}: " if rank else ""
    found = list(exceptions(above))
    own = (f"[rank{rank}]:", f"[default{local_rank}]:")
    signals = [told for (told,) in _all(_SIGNAL, root)]
    said = (
        [told for _, _, told in exceptions(root)]
        or [told for _, prefix, told in found if prefix in own]
        or [told for told in signals if not told.startswith(_ABORTED)]
        or [told for _, _, told in found]
        or signals
    )
    if said:
        return who + said[-1]
    (code,) = _first(_EXIT_CODE, root) or ("?",)
    return (
        f"{who}exit code {code}; its exception stands in the log above torchrun's summary, and here too if"
        " main() is decorated with torch.distributed.elastic.multiprocessing.errors.record"
    )


def _all(pattern: re.Pattern[str], lines: Sequence[str]) -> list[tuple[str, ...]]:
    return [match.groups() for line in lines if (match := pattern.match(line))]


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> tuple[str, ...] | None:
    return next(iter(_all(pattern, lines)), None)
