"""Links in the documentation lead somewhere, as far as this repository goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted([*Path().glob("*.md"), *Path("docs").rglob("*.md"), *Path("examples").rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchor(heading: str) -> str:
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_relative_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page} links to {target}"
        if fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ +(.+)$", file.read_text(), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, f"{page} links to {target}"
