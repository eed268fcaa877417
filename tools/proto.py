"""Generates the Python modules of the control protocol, with types (``make proto``).

The compilers write into a module that it wants a protobuf and a gRPC at least as new as they are. What the
modules do works with far older ones, which ``make test-oldest`` shows, so that these checks are left out:
the package goes into environments that have a protobuf of their own.
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
"""The checks of versions, by the end of a module's name."""


def generate(folder: Path) -> None:
    """Write the generated modules to a folder.

    Raises
    ------
    ValueError
        A compiler writes its check another way than this module knows.
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
