"""Previews: with ``FLEET_PRINT_PROGRAM=1``, a replica prints its programs instead of running them.

A replica that is about to join or serve a job prints the programs that it would run, and exits successfully.
It binds no port and waits for no peer, so each role can be inspected alone.
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
    """Return whether the environment asks for programs to be printed.

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
    """Print a transpiled program if the environment asks for it; return whether it was printed.

    Parameters
    ----------
    program : Program
        The program that is about to run. Its startup program is printed first, unless it was printed before.

    Returns
    -------
    bool
        True if the program was printed; the caller must then not run it.

    Raises
    ------
    SystemExit
        With status 0, after printing a program that trains or serves: there is nothing left to do.
    ConfigurationError
        As for `preview_asked`.
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
