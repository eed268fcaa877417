"""The documentation as a whole: ways in, tables that can be read, figures in one place, and the site."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.support.browser import browser_page, find_browser
from tests.support.documents import PAGES
from tests.unit.repository.test_links import LINK, anchor
from tools.site import render

README = Path("README.md")
FIGURES = Path("docs/speed.md")
DRAWN = "[...document.querySelectorAll('div.mermaid')].filter(each => each.clientHeight > 100)"
BROWSER = find_browser()
MKDOCS = Path(".venv-docs/bin/mkdocs")
CELL_WORDS = 40
README_LINES = 110

ALL = sorted([*Path().glob("*.md"), *Path("docs").rglob("*.md"), *Path("examples").rglob("*.md")])


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def cells(page: Path) -> list[str]:
    rows = (line for line in without_code(page).splitlines() if line.startswith("|"))
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def sections(page: Path) -> dict[str, str]:
    """Return the text below each title of the second level."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def targets(text: str, page: Path) -> list[Path]:
    """Return the files to which a page's text leads, with one click each."""
    found = (each.partition("#")[0] for each in LINK.findall(text) if not re.match(r"[a-z]+:", each))
    return [(page.parent / each).resolve().relative_to(Path.cwd()) if each else page for each in found]


def rows_of_the_readme() -> dict[str, list[Path]]:
    """Return the pages of each row of the table of pages."""
    rows = re.findall(r"^\| \*\*([\w ]+)\*\* \| (.*) \|$", README.read_text(), re.MULTILINE)
    return {name: targets(text, README) for name, text in rows}


WAYS = [page for page in rows_of_the_readme()["Start"] if page.suffix == ".md"]


@pytest.mark.parametrize("page", ALL, ids=str)
def test_no_cell_of_a_table_is_a_paragraph(page: Path):
    assert {cell: len(cell.split()) for cell in cells(page) if len(cell.split()) > CELL_WORDS} == {}


def test_the_readme_fits_two_screens():
    assert len(README.read_text().splitlines()) <= README_LINES


def navigation() -> list[tuple[str, str]]:
    """Return the pages of the site in its order, each after the name of its part."""

    class Loader(yaml.SafeLoader):
        """Reads what mkdocs itself evaluates as nothing."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    parts: list[dict[str, list[dict[str, str]]]] = yaml.load(Path("mkdocs.yml").read_text(), Loader)["nav"]  # noqa: S506 a safe loader
    return [
        (name, path)
        for part in parts
        for name, pages in part.items()
        for page in pages
        for path in page.values()
    ]


def test_the_table_of_pages_has_the_order_of_the_site():
    listed = [path for pages in rows_of_the_readme().values() for path in pages]
    order = [Path(page) for _, page in navigation()]
    shown = [path / "README.md" if path.is_dir() else path for path in listed]
    assert shown == [page for page in order if page != README and page.parts[0] != "api"]


def test_every_page_is_in_the_site_s_navigation():
    there = {page for _, page in navigation()}
    reference = {str(path) for path in Path("docs/reference").glob("*.md")}
    assert {*PAGES, *reference} <= there


def test_there_are_four_ways_in():
    assert [page.stem for page in WAYS] == ["first-job", "torchrec", "platform", "paddle"]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_start_example_reference_and_help_are_within_two_clicks(way: Path):
    """The first click leads from the README to the way's page, the second from there."""
    there = sections(way)
    assert re.search(r"^```sh$", there["Start"], re.MULTILINE)
    assert any(path.parts[0] == "examples" for path in targets(there["Example"], way))
    assert any(path.parts[:2] == ("docs", "reference") for path in targets(there["Reference"], way))
    help_ = LINK.findall(there["When it breaks"])
    assert len(help_) >= 3
    assert any(anchor("Reasons in a job's status") in each for each in help_)


def test_figures_are_listed_in_one_place_with_the_command_that_printed_them():
    table = sections(FIGURES)["All figures"]
    commands = r"python -m benchmarks\.\w+|make bench[\w-]*"
    for page in [*map(Path, PAGES), *Path("examples").glob("*/README.md")]:
        if page == Path("CONTRIBUTING.md"):
            continue
        found = {*re.findall(commands, page.read_text())} - {"make bench", "make bench-network"}
        assert found <= {*re.findall(commands, table)}, f"{page} has figures that {FIGURES} does not list"
        assert not found or page in targets(table, FIGURES), f"{FIGURES} does not name {page}"


def test_what_the_page_of_states_names_is_there():
    named = re.findall(r"`(tests/[\w/.]+)`", Path("docs/state.md").read_text())
    assert len(named) > 10
    assert [path for path in named if not Path(path).exists()] == []


def test_only_pages_with_a_diagram_load_the_script_that_draws_it():
    folder = Path("docs/reference").absolute()
    assert "<script" not in render("```sh\nmermaid\n```\n", folder)
    page = render("```mermaid\nflowchart LR\n```\n", folder)
    assert page.endswith('\n\n<script src="../../mermaid.min.js"></script>\n')


def test_pages_are_written_as_the_site_s_markdown_needs_them():
    page = "Text:\n- [a](../examples/ctr)\n  - b [c](x.md#d)\n| x |\n|---|\n```sh\n- [a](../examples)\n```\n"
    items = "- [a](../examples/ctr/README.md)\n    - b [c](x.md#d)\n"
    rest = "| x |\n|---|\n```sh\n- [a](../examples)\n```\n"
    assert render(page, Path("docs").absolute()) == f"Text:\n\n{items}\n{rest}"


class Loaded(HTMLParser):
    """The addresses from which a page loads something by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") or (
            tag == "link" and given.get("rel") != "canonical"
        ):
            self.found += [each for each in (given.get("src"), given.get("href")) if each]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, which is built once."""
    if not MKDOCS.exists():
        pytest.skip("`make .venv-docs/.installed` brings mkdocs")
    tmp_path = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "tools.site", tmp_path / "pages"], check=True, timeout=100)
    settings = Path("mkdocs.yml").read_text()
    for name in ("pages", "html"):
        settings = settings.replace(f".build/site/{name}", str(tmp_path / name))
    (tmp_path / "mkdocs.yml").write_text(
        re.sub(r"\b(operator|trainer_image)/src", rf"{Path.cwd()}/\1/src", settings)
    )
    ended = subprocess.run(
        [MKDOCS, "build", "--strict", "--config-file", tmp_path / "mkdocs.yml"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "html"


@pytest.mark.programs
@pytest.mark.timeout(400)
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(html: Path):
    pages = sorted(html.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert [each for each in loaded.found if re.match(r"(https?:)?//", each)] == [], page
    styles = "".join(path.read_text() for path in html.rglob("*.css"))
    assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", styles)
    api = (html / "api" / "client.html").read_text()
    assert 'id="fleet_operator.client.FleetJobClient.submit"' in api


@pytest.mark.programs
@pytest.mark.timeout(400)
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (Debian: chromium)")
@pytest.mark.parametrize(("page", "diagrams"), [("CONTRIBUTING", 1), ("docs/reference/wire", 2)])
async def test_diagrams_are_drawn_without_a_network(html: Path, tmp_path: Path, page: str, diagrams: int):
    assert BROWSER is not None
    async with browser_page(BROWSER, tmp_path) as seen:
        await seen.open(f"file://{html / page}.html")
        await seen.until(f"{DRAWN}.length === {diagrams}")
        assert [each for each in seen.requested if not each.startswith(("file:", "data:"))] == []
