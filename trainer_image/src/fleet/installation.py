"""Detects another distribution with the import name `fleet`: the client of CoreOS's fleet (ended in 2018).

pip installs both into one folder without a warning. The last one installed puts its ``__init__.py`` there;
uninstalling either removes that file.
"""

import sys
from pathlib import Path
from types import ModuleType

__all__ = ["problem_with", "refuse_another"]

REPAIR = (
    "run 'pip uninstall fleet', and then install fleet-trainer again with 'pip install --force-reinstall "
    "--no-deps' and its wheel"
)


def problem_with(package: ModuleType, folder: Path) -> str | None:
    """Return how another distribution has damaged this package and how to repair it, or None.

    Parameters
    ----------
    package : module
        What ``import fleet`` gave.
    folder : Path
        The folder of this file.
    """
    if not hasattr(package, "NAMES"):
        found = "another distribution's" if package.__file__ else "gone"
        return (
            f"{folder / '__init__.py'} is {found}: the distribution 'fleet' (a client of CoreOS's fleet) has "
            f"the same import name as fleet-trainer, and was installed or uninstalled after it: {REPAIR}"
        )
    if (folder / "v1" / "client.py").exists():
        return (
            f"the distribution 'fleet' (a client of CoreOS's fleet) is installed in {folder} too; "
            f"uninstalling it will break fleet-trainer, which has the same import name: {REPAIR}"
        )
    return None


def refuse_another() -> None:
    """Check that ``import fleet`` imported this package.

    Raises
    ------
    ImportError
        It gave another distribution's, or none is left.
    """
    package = sys.modules["fleet"]
    if not hasattr(package, "NAMES"):
        raise ImportError(problem_with(package, Path(__file__).parent), name="fleet")
