"""What the processes of a benchmark answer, line by line; one that is stuck is named."""

import select
from typing import IO

__all__ = ["hear"]

ANSWER_SECONDS = 600.0
"""Longer than the slowest answer of any benchmark takes."""


def hear(pipe: IO[str], who: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return the next line that a process says; empty when it has ended.

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
    if not select.select([pipe], [], [], seconds)[0]:
        raise SystemExit(
            f"{who} said nothing for {seconds:g} s, expected a line; what it printed above may say why"
        )
    return pipe.readline().strip()
