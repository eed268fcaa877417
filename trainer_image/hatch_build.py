"""Compile what is written in C, where there is a compiler; the package does without it, more slowly."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "fleet/tables/kernels/kernels.so"
"""Of all C files that lie beside it."""


class CompileHook(BuildHookInterface[Any]):
    """Adds the library, and names the kind of machine that the wheel is for.

    Nothing of Python's is needed to load it, so one wheel serves every version.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; say so, and go on, where that is not possible."""
        in_place = Path(self.root, "src", LIBRARY)
        if version == "editable":
            in_place.unlink(missing_ok=True)
        self._folder = tempfile.TemporaryDirectory(dir=in_place.parent if version == "editable" else None)
        library = Path(self._folder.name, in_place.name)
        if (problem := self._compile(library)) is not None:
            self.app.display_warning(f"rows of tables will be found by numpy, added by torch: {problem}")
            return
        if version == "editable":
            library.replace(in_place)
        else:
            build_data["force_include"][str(library)] = LIBRARY
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def _compile(self, library: Path) -> str | None:
        """Make the library; return why that is not possible, if it is not."""
        if sys.platform != "linux":
            return f"nothing is compiled on {sys.platform}"
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if shutil.which(compiler[0]) is None:
            return f"there is no C compiler {compiler[0]}"
        # The C code says itself which products and sums are rounded at once.
        options = ["-O3", "-shared", "-fPIC", "-ffreestanding", "-nostdlib", "-ffp-contract=off"]
        sources = sorted(map(str, Path(self.root, "src", LIBRARY).parent.glob("*.c")))
        command = [*compiler, *options, "-o", str(library), *sources]
        ended = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        return f"{shlex.join(command)} failed: {ended.stderr.strip()}" if ended.returncode else None
