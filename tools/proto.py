"""Generates the Python modules of the control protocol, with types (``make proto``).

The compilers add checks to the modules that require a protobuf and a gRPC at least as new as the compilers.
The modules work with far older versions, as ``make test-oldest`` shows. The checks are therefore removed,
because users install the package in environments with their own protobuf.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["PROTO", "SOURCE", "generate"]

SOURCE = Path(__file__).parents[1] / "trainer_image" / "src"
PROTO = "fleet/parameter_server/control/proto/control.proto"
CHECKS = {
    "_pb2.py": r"^from google\.protobuf import runtime_version.*\n|^_runtime_version\.(?:.*\n)*?\)\n",
    "_pb2_grpc.py": r"^import warnings\n|^GRPC_GENERATED_VERSION = (?:.*\n)*?    \)\n\n",
}
"""The version checks to remove, by the ending of a module's name."""


def generate(folder: Path) -> None:
    """Write the generated modules to a folder.

    Raises
    ------
    ValueError
        A compiler writes its version check in a form that this tool does not recognize.
    """
    plugins = Path(sys.executable).parent
    outputs = ("python", "grpc_python", "mypy", "mypy_grpc")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={SOURCE}",
            *(f"--{name}_out={'quiet:' if name.startswith('mypy') else ''}{folder}" for name in outputs),
            PROTO,
        ],
        check=True,
        env={**os.environ, "PATH": f"{plugins}{os.pathsep}{os.environ['PATH']}"},
    )
    for end, checks in CHECKS.items():
        path = (folder / PROTO).with_name(f"control{end}")
        text, found = re.subn(checks, "", path.read_text(), flags=re.MULTILINE)
        if found != 2:
            raise ValueError(f"{path.name} has {found} parts of the version check, expected 2: adapt CHECKS")
        path.write_text(text)


if __name__ == "__main__":
    generate(SOURCE)
