"""An environment without installed programs, to which tests can add programs and a fake `go`."""

from __future__ import annotations

import os
from pathlib import Path


class BareMachine:
    """An environment in which no program is found; builds by the fake `go` are only recorded.

    Parameters
    ----------
    folder : Path
        The folder of all files.
    """

    def __init__(self, folder: Path) -> None:
        shell = str(Path("/bin/sh").resolve().parent)
        self._builds = folder / "builds"
        self.path = folder / "path"
        self.home = folder / "home"
        self.cache = self.home / ".cache" / "fleetjob" / "bin"
        self.environ = {"HOME": str(self.home), "PATH": f"{self.path}{os.pathsep}{shell}"}

    def put_program(self, name: str, prints: str, folder: Path | None = None) -> Path:
        """Write a program that always prints the same line, by default to the folder on ``PATH``."""
        return _script(folder or self.path, name, f"echo '{prints}'\n")

    def put_go(self, *, version: str = "go1.26.8", first: str = ":") -> None:
        """Add a fake `go` to ``PATH`` that records each build and produces a script."""
        _script(
            self.path,
            "go",
            f"""if [ "$1" = version ]; then echo "go version {version} linux/amd64"; exit 0; fi
echo "$@" >> {self._builds}
{first}
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
program=${{1##*/}}
out=${{out-$GOBIN/${{program%@*}}}}
printf '#!/bin/sh\\n' > "$out"
chmod +x "$out"
""",
        )

    @property
    def builds(self) -> list[str]:
        """The targets that the fake `go` has built, in order."""
        return self._builds.read_text().splitlines() if self._builds.exists() else []


def _script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path
