"""No two modules need each other: neither by an import within a function, nor by one for types alone."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest


def circle_in(package: str) -> list[str]:
    """Return modules of a package each of which imports the next one, or none."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    imported = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize("package", ["fleet", "fleet_operator"])
def test_no_import_leads_back(package):
    assert circle_in(package) == []


@pytest.mark.parametrize(
    "second",
    [
        pytest.param("import around.first", id="at-the-top"),
        pytest.param("def late():\n    from around import first", id="within-a-function"),
        pytest.param(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import around.first", id="for-types"
        ),
    ],
)
def test_a_circle_is_found(second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "around").mkdir()
    for name, text in {"__init__": "", "first": "import around.second", "second": second}.items():
        (tmp_path / "around" / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(circle_in("around")) == {"around.first", "around.second"}
