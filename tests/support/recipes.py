"""Recipes from the documentation: named code blocks, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PAGE", "recipes", "written"]

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own-script.md"
BLOCK = re.compile(r"^<!-- run: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recipes() -> dict[str, str]:
    """Return the recipes on a page by name."""
    return dict(BLOCK.findall(PAGE.read_text()))


def written(folder: Path, name: str, **replaced: str) -> Path:
    """Write a recipe to a file in a folder, as a user would copy it; return the path.

    Parameters
    ----------
    folder : Path
        The folder, which is created if it does not exist.
    name : str
        The name of the block and of the file.
    **replaced : str
        Module names to replace in the copy: the name on the page, and the new one, without ``.py``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = recipes()[name]
    for old, new in replaced.items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(f"{old}.py", f"{new}.py")
    path = folder / name
    path.write_text(text)
    return path
