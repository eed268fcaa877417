"""PyPI's distribution `fleet` has the same import package: both installed, one over the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fleet

pytestmark = pytest.mark.programs

OURS = Path(fleet.__file__).parent


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder: our package, with the other's files added, all but its `__init__.py`."""
    package = tmp_path / "fleet"
    shutil.copytree(OURS, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (package / "v1").mkdir()
    (package / "v1" / "__init__.py").touch()
    (package / "v1" / "client.py").touch()
    return tmp_path


def python(site: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )


def test_ours_alone_says_nothing(site: Path):
    shutil.rmtree(site / "fleet" / "v1")
    ended = python(site, "import fleet; print(fleet.__file__)")
    assert (ended.stdout.strip(), ended.stderr) == (str(site / "fleet" / "__init__.py"), "")


def test_ours_over_the_other_works_and_warns(site: Path):
    ended = python(site, "import fleet, fleet.parameter_server; print(len(fleet.NAMES) > 20)")
    assert ended.stdout.strip() == "True"
    assert (
        "RuntimeWarning: the distribution 'fleet' (a client of CoreOS's fleet) is installed" in ended.stderr
    )
    assert "pip uninstall fleet" in ended.stderr


@pytest.mark.parametrize("package", ["parameter_server", "collective"])
@pytest.mark.parametrize(
    ("left", "found"),
    [("import fleet.v1\n", "is another distribution's"), (None, "is gone")],
    ids=["installed-over-ours", "uninstalled-after-ours"],
)
def test_without_our_init_training_is_refused(site: Path, package: str, left: str | None, found: str):
    init = site / "fleet" / "__init__.py"
    if left is None:
        init.unlink()
    else:
        init.write_text(left)
    # Without site-packages, where this repository's package is installed too.
    ended = python(site, f"from fleet.{package} import fleet", "-S")
    assert ended.returncode == 1
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("ImportError")]
    assert f"{init} {found}" in error
    assert "pip install --force-reinstall --no-deps" in error
