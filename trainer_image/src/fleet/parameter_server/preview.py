"""Programs shown in place of being run: what ``FLEET_PRINT_PROGRAM=1`` asks of a replica.

A replica that is about to join a job, or to serve it, prints what it would run and ends well. Nothing is
bound and nobody is waited for, so each role can be looked at alone.
"""

import os
import sys
from typing import Final

from fleet.errors import ConfigurationError
from fleet.fluid import Program

__all__ = ["VARIABLE", "previewed"]

VARIABLE: Final = "FLEET_PRINT_PROGRAM"
_VALUES: Final = {"": False, "0": False, "false": False, "1": True, "true": True}
_shown: list[Program] = []


def previewed(program: Program) -> bool:
    """Print a transpiled program, if the environment asks for programs to be printed.

    Parameters
    ----------
    program : Program
        About to be run. Its startup program is printed before it, unless it was before.

    Returns
    -------
    bool
        Whether it was printed: it is not to be run then.

    Raises
    ------
    SystemExit
        With status 0, after a program that trains or serves: there is nothing to do behind it.
    ConfigurationError
        The variable has another value than 0 or 1.
    """
    text = os.environ.get(VARIABLE, "")
    if text.lower() not in _VALUES:
        raise ConfigurationError(f"{VARIABLE} is {text!r}; expected 1, to print programs, or 0")
    if not _VALUES[text.lower()]:
        return False
    for each, kind in ((program.startup_program, "startup"), (program, _kind(program))):
        if each is not None and each not in _shown:
            _shown.append(each)
            print(f"// the {kind} program\n{each}\n", flush=True)
    if _kind(program) == "main":
        sys.exit(0)
    return True


def _kind(program: Program) -> str:
    runs = any(op.type in ("send", "listen_and_serv") for op in program.global_block().ops)
    return "main" if runs else "startup"
