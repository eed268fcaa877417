"""The code blocks in README.md, CONTRIBUTING.md and docs/, for tests that run them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["PAGES", "Block", "block", "blocks"]

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
"""The manually written pages; those in docs/reference are generated."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced code block on a page."""

    page: str
    section: str
    """The heading above the block."""
    language: str
    code: str


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Return the code blocks of a page such as ``docs/tables.md``, in order."""
    text = (ROOT / page).read_text()
    found = []
    for fence in _FENCE.finditer(text):
        # Blocks are removed first, because a shell comment looks like a heading.
        titles = _TITLE.findall(_FENCE.sub("", text[: fence.start()]))
        found.append(Block(page, titles[-1], fence[1], fence[2]))
    return tuple(found)


def block(page: str, section: str, language: str = "python", position: int = 0) -> str:
    """Return the code of one block on a page, selected by language and heading or by index."""
    found = [each.code for each in blocks(page) if (each.section, each.language) == (section, language)]
    assert position < len(found), f"{page} has {len(found)} blocks of {language} below {section!r}"
    return found[position]
