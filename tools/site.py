"""Prepares the pages of the documentation site for mkdocs (``make site``).

mkdocs builds the site from ``.build/site/pages``, which has the layout of the repository, so that relative
links have the same targets. A link to a folder leads to the folder's README. Some pages exist only on the
site: an index of the examples, the files of each example below its README, and the Python API, which
mkdocstrings renders from the public names of both packages. A page with a diagram loads the site's own copy
of the script that draws it; otherwise mkdocs-material would load the script from another host.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fleet
import fleet.nn
import fleet.tables
import fleet_operator.api
import fleet_operator.client

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).parent.parent
PAGES = ROOT / ".build" / "site" / "pages"
MERMAID = ROOT / ".venv-docs" / "mermaid" / "artoo_mermaid" / "assets" / "mermaid.min.js"
"""Mermaid's own script, which draws diagrams in the browser (docs/mermaid.lock)."""

SINGLE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "LICENSE",
    "charts/fleet-operator/README.md",
    "charts/fleet-operator/values.schema.json",
)
FOLDERS = ("docs", "examples", "contract/env")
LANGUAGES = {".py": "python", ".yaml": "yaml"}

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
_FENCE = re.compile(r"^(```+)")
_ITEM = re.compile(r"^( *)([-*]|\d+\.) ")

API: Mapping[str, tuple[str, str, Iterable[str]]] = {
    "job": (
        "The fleet object",
        "A script imports it from `fleet.parameter_server` or from `fleet.collective`.",
        ("fleet.facade.parameter_server.Fleet", "fleet.facade.collective.Fleet"),
    ),
    "fleet": (
        "Names of fleet",
        "Import these names from `fleet`; the `fleet` object of a job has them as attributes too.",
        [f"{fleet.NAMES[name]}.{name}" for name in fleet.__all__],
    ),
    "nn": (
        "fleet.nn",
        "Modules whose tables are on the parameter servers.",
        [f"fleet.nn.{name}" for name in fleet.nn.__all__],
    ),
    "tables": (
        "fleet.tables",
        "Options and rules of embedding tables.",
        [f"fleet.tables.{name}" for name in fleet.tables.__all__],
    ),
    "client": (
        "fleet_operator.client",
        "Python clients for jobs on a cluster.",
        [f"fleet_operator.client.{name}" for name in fleet_operator.client.__all__],
    ),
    "api": (
        "fleet_operator.api",
        "The models that the clients return; [every field of a manifest](../docs/reference/fleetjob.md).",
        [f"fleet_operator.api.{name}" for name in fleet_operator.api.__all__],
    ),
}
"""The pages of the Python API: title, introduction, and the documented names of each."""


def render(text: str, folder: Path) -> str:
    """Convert a page from GitHub's Markdown to the stricter dialect of Python-Markdown.

    Parameters
    ----------
    text : str
        The page.
    folder : Path
        The folder of the page, to which its links are relative.
    """
    lines, fence, before = list[str](), "", ""
    if "```mermaid\n" in text:  # only on these pages, because the script is large
        root = "../" * len(folder.relative_to(ROOT).parts)
        text += f'\n<script src="{root}{MERMAID.name}"></script>\n'
    for line in text.splitlines():
        if (found := _FENCE.match(line)) is not None:
            fence = "" if line.startswith(fence) and fence else fence or found[1]
        elif not fence:
            line = _LINK.sub(lambda found: _target(found[0], folder), line)
            starts_list = _ITEM.match(line) and not _ITEM.match(before) and not before.startswith(" ")
            starts_table = line.startswith("|") and not before.startswith("|")
            if before.strip() and (starts_list or starts_table):
                lines.append("")
            if (item := _ITEM.match(line)) is not None:  # four spaces for each level
                line = item[1] * 2 + line.lstrip()
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


def _target(target: str, folder: Path) -> str:
    is_folder = not re.match(r"[a-z]+:", target) and (folder / target).is_dir()
    return f"{target.rstrip('/')}/README.md" if is_folder else target


def example_page(folder: Path) -> str:
    """Return the page of an example: its README, if any, and its other files."""
    readme = folder / "README.md"
    parts = [readme.read_text() if readme.exists() else f"# `{folder.relative_to(ROOT)}`\n"]
    shown = (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in LANGUAGES)
    parts += [f"## {path.name}\n````{LANGUAGES[path.suffix]}\n{path.read_text()}````\n" for path in shown]
    return "\n".join(parts)


def api_page(title: str, story: str, names: Iterable[str]) -> str:
    """Return a page for mkdocstrings to fill."""
    return "\n".join([f"# {title}", story, "", *(f"::: {name}\n" for name in names)])


def pages() -> dict[Path, str | Path]:
    """Return the pages of the site by path, each as text or as the path of a file to copy."""
    found: dict[Path, str | Path] = {}
    for path in [
        *(ROOT / name for name in SINGLE),
        *(each for name in FOLDERS for each in (ROOT / name).rglob("*")),
    ]:
        if path.is_file() and path.suffix not in (".pyc", ".lock"):
            text = render(path.read_text(), path.parent) if path.suffix == ".md" else path
            found[path.relative_to(ROOT)] = text
    listed = ["# Examples", "Tests train each of them.", "", "| example | what it trains |", "|---|---|"]
    for folder in (*sorted((ROOT / "examples").iterdir()), ROOT / "contract" / "env"):
        if folder.is_dir() and folder.name != "__pycache__":
            text = example_page(folder)
            found[folder.relative_to(ROOT) / "README.md"] = render(text, folder)
            if folder.parent.name == "examples":
                title = text.partition("\n")[0].lstrip("# ")
                listed.append(f"| [{folder.name}]({folder.name}/README.md) | {title} |")
    found[Path("examples/README.md")] = "\n".join([*listed, ""])
    for name, (title, story, names) in API.items():
        found[Path("api") / f"{name}.md"] = api_page(title, story, names)
    found[Path(MERMAID.name)] = MERMAID
    return found


def main(folder: Path) -> None:
    """Replace the content of a folder with the pages of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in pages().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_text(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PAGES)
