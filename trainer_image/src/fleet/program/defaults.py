"""The default programs: those of the latest capture, for scripts that name none."""

from fleet.program.ir import Program

__all__ = ["default_main_program", "default_startup_program", "set_default_programs"]

_defaults: dict[str, Program] = {}


def default_main_program() -> Program:
    """Return the program of the latest `Program.capture`; an empty one before the first."""
    return _defaults.setdefault("main", Program())


def default_startup_program() -> Program:
    """Return the startup program of the latest `Program.capture`; an empty one before the first."""
    return _defaults.setdefault("startup", Program())


def set_default_programs(main: Program) -> None:
    """Make a program and its startup program the defaults."""
    _defaults["main"] = main
    _defaults["startup"] = main.startup_program or Program()
