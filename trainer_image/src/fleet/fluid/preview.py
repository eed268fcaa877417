"""Previews: with ``FLEET_PRINT_PROGRAM=1`` a replica prints its programs and does not run them.

A replica that is about to join a job, or to serve it, prints what it would run and ends well. Nothing is
bound and no peer is awaited, so each role can be looked at alone.
"""

import os
import sys
from typing import Final

from fleet.errors import ConfigurationError
from fleet.fluid.program import Program

__all__ = ["VARIABLE", "preview_asked", "previewed"]

VARIABLE: Final = "FLEET_PRINT_PROGRAM"
_VALUES: Final = {"": False, "0": False, "false": False, "1": True, "true": True}
_shown: list[Program] = []


def preview_asked() -> bool:
    """Whether the environment asks for programs to be printed.

    Raises
    ------
    ConfigurationError
        The variable has another value than 0 or 1.
    """
    text = os.environ.get(VARIABLE, "")
    if text.lower() not in _VALUES:
        raise ConfigurationError(f"{VARIABLE} is {text!r}; expected 1, to print programs, or 0")
    return _VALUES[text.lower()]


def previewed(program: Program) -> bool:
    """Print a transpiled program, if the environment asks for programs to be printed.

    Parameters
    ----------
    program : Program
        About to be run. Its startup program is printed first, unless it was printed before.

    Returns
    -------
    bool
        Whether it was printed: it is not to be run then.

    Raises
    ------
    SystemExit
        With status 0, after a program that trains or serves: there is nothing left to do.
    ConfigurationError
        As of `preview_asked`.
    """
    if not preview_asked():
        return False
    for each in (program.startup_program, program):
        if each is not None and each not in _shown:
            _shown.append(each)
            print(f"// the {each.part} program\n{each}\n", flush=True)
    if program.part == "main":
        sys.exit(0)
    return True
