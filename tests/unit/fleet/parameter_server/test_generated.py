"""The committed protobuf modules are what the .proto file generates today."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fleet.parameter_server.control.proto as package

pytestmark = pytest.mark.programs

PROTO = "fleet/parameter_server/control/proto/control.proto"
SOURCE = Path(package.__path__[0]).parents[3]


def test_the_committed_modules_are_up_to_date(tmp_path):
    plugins = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{SOURCE}",
            *(f"--{name}={tmp_path}" for name in ("python_out", "grpc_python_out")),
            *(f"--{name}=quiet:{tmp_path}" for name in ("mypy_out", "mypy_grpc_out")),
            PROTO,
        ],
        check=True,
        timeout=60,
        env={**os.environ, "PATH": f"{plugins}{os.pathsep}{os.environ['PATH']}"},
    )
    generated = sorted((tmp_path / PROTO).parent.iterdir())
    assert len(generated) == 4
    for made in generated:
        committed = SOURCE / Path(PROTO).parent / made.name
        assert committed.read_text() == made.read_text(), f"{made.name} is stale: regenerate it from {PROTO}"
