"""Reads the output of benchmark processes line by line, and names processes that stall or end."""

import select
from collections.abc import Collection, Mapping
from typing import IO

__all__ = ["hear", "hear_all"]

ANSWER_SECONDS = 600.0
"""Longer than the slowest answer in any benchmark."""


def hear(pipe: IO[str], who: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return the next line of a process's output, or an empty string if the process has ended.

    Parameters
    ----------
    pipe : text stream
        The output, with one line per request, so that no line remains in the buffer.
    who : str
        The process, for the message.
    seconds : float

    Raises
    ------
    SystemExit
        The process wrote nothing within this time.
    """
    (line,) = hear_all({who: pipe}, {who}, seconds).values()
    return line


def hear_all(
    pipes: Mapping[str, IO[str]], awaited: Collection[str], seconds: float = ANSWER_SECONDS
) -> dict[str, str]:
    """Return the next line of each process, once all have written one or any has ended.

    Parameters
    ----------
    pipes : mapping of str to text stream
        The outputs of all processes by name, including those from which no line is awaited but which may end.
    awaited : collection of str
        The names of the processes that must write a line.
    seconds : float
        The time limit between two lines.

    Returns
    -------
    dict
        The lines by name. If a process has ended, only its name, with an empty line.

    Raises
    ------
    SystemExit
        No awaited process wrote a line within this time.
    """
    said: dict[str, str] = {}
    while missing := sorted(set(awaited) - said.keys()):
        waiting = {pipe: name for name, pipe in pipes.items() if name not in said}
        ready, _, _ = select.select(list(waiting), [], [], seconds)
        if not ready:
            raise SystemExit(
                f"{missing[0]} said nothing for {seconds:g} s, expected a line; what it printed above may "
                "say why"
            )
        for pipe in ready:
            line = pipe.readline()
            if not line:
                return {waiting[pipe]: ""}
            said[waiting[pipe]] = line.strip()
    return {name: said[name] for name in awaited}
