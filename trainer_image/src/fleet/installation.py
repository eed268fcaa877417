"""Detects an unrelated distribution that has the same import name, `fleet`.

The other distribution is the client of CoreOS's fleet, which ended in 2018. pip installs both into one folder
without a warning. The folder's ``__init__.py`` is that of the last one installed; uninstalling either removes
the file.
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
    """Describe how another distribution damages this package; return None if none does.

    Parameters
    ----------
    package : module
        The module that ``import fleet`` has imported.
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
    """Raise ImportError unless ``import fleet`` has imported this package.

    Raises
    ------
    ImportError
        It has imported another distribution's package, or the package's ``__init__.py`` is gone.
    """
    package = sys.modules["fleet"]
    if not hasattr(package, "NAMES"):
        raise ImportError(problem_with(package, Path(__file__).parent), name="fleet")
