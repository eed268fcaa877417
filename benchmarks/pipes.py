"""Reads the output of benchmark processes line by line, and names processes that stall or end."""

import select
from collections.abc import Collection, Mapping
from typing import IO

__all__ = ["hear", "hear_all"]

ANSWER_SECONDS = 600.0
"""Longer than the slowest answer of any benchmark takes."""


def hear(pipe: IO[str], who: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return the next line of a process's output, or an empty string if the process has ended.

    Parameters
    ----------
    pipe : text stream
        One line for each question, so that nothing is left in its buffer when the next is awaited.
    who : str
        The process, for the message.
    seconds : float

    Raises
    ------
    SystemExit
        It said nothing for so long.
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
        Those of all processes, by name: one that should only live may end, and the others wait for it.
    awaited : collection of str
        The names of those that are to say a line.
    seconds : float
        From one line to the next.

    Returns
    -------
    dict
        The lines by name. If a process has ended, its name with an empty line, and no other.

    Raises
    ------
    SystemExit
        None of those that are awaited said anything for so long.
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
