from pathlib import Path

import pytest

from fleet.wire import Kind
from tools import reference

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", reference.pages(), ids=str)
def test_a_generated_page_is_what_its_source_says(path: Path) -> None:
    assert (ROOT / path).read_text() == reference.pages()[path], "run `make docs`, and commit what it wrote"


def test_every_field_of_the_spec_is_in_the_reference() -> None:
    page = reference.fleetjob_page()
    for field in ("spec.mode", "spec.runPolicy.backoffLimit", "status.lastFailure.terminationMessage"):
        assert f"| `{field}` |" in page


def test_every_kind_of_frame_is_an_edge_of_the_diagram() -> None:
    page = reference.wire_page()
    for kind in Kind:
        assert f": {kind.name}\n" in page, f"no state accepts {kind.name}"
