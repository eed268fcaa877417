"""Decision records have one form, and their index lists all of them."""

import re
from datetime import date
from pathlib import Path

import pytest

FOLDER = Path("docs/adr")
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
SECTIONS = ["Context", "Decision", "Consequences"]


def title_of(record: Path) -> str:
    """Return the title from the first line of a record."""
    first = record.read_text().partition("\n")[0]
    found = re.fullmatch(r"# (\d{4}) · (\S.*)", first)
    assert found, f"{record} begins with {first!r}, expected '# NNNN · Title'"
    assert record.name.startswith(f"{found[1]}-"), f"{record} has the number {found[1]}"
    return found[2]


def date_and_status_of(record: Path) -> tuple[str, str]:
    """Return the date and the status from the second line of a record."""
    line = record.read_text().splitlines()[1]
    found = re.fullmatch(r"Date: (\d{4}-\d{2}-\d{2}) · Status: (accepted|superseded by \d{4})", line)
    assert found, f"{record}: {line!r}, expected 'Date: YYYY-MM-DD · Status: accepted'"
    date.fromisoformat(found[1])
    return found[1], found[2]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_has_the_form(record: Path):
    title_of(record)
    date_and_status_of(record)
    sections = re.findall(r"^## (.+)$", record.read_text(), re.MULTILINE)
    assert sections in (SECTIONS, [*SECTIONS, "Alternatives"])


def test_numbers_are_given_once():
    numbers = [record.name[:4] for record in RECORDS]
    assert len(numbers) == len(set(numbers))


def test_the_index_lists_every_record():
    index = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \| (.+) \| (.+) \|$", index, re.MULTILINE)
    assert [(number, file, title) for number, file, title, _, _ in rows] == [
        (record.name[:4], record.name, title_of(record)) for record in RECORDS
    ]
    told = {file: (day, status) for _, file, _, status, day in rows}
    assert {record.name: told[record.name] for record in RECORDS} == {
        record.name: date_and_status_of(record) for record in RECORDS
    }
