"""Builds programs from published Go modules with pinned versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from tools.assets.lookup import GO_MODULES
from tools.assets.programs import AssetError, MissingError, Program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
GO_FLAGS = "-buildvcs=false"
"""Added to the user's GOFLAGS, such as -p=1 on a busy machine."""
GO_VERSION = (1, 26)
BUILD_SECONDS = 3600.0
"""The time limit of one build, for a slow machine with empty caches."""
TELL_SECONDS = 30.0
"""The interval at which a running build prints a line."""


def build(
    name: str, program: Program, to: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Build a program and write it to the file `to`; print progress every half minute.

    Raises
    ------
    MissingError
        Go is missing or too old.
    AssetError
        The build failed, or took longer than an hour.
    """
    go = _go(name, program, environ)
    flags = ["-trimpath", "-ldflags", f"-s -w {program.flags}"]
    if program.module:
        where = GO_MODULES / program.module
        command = [go, "build", *flags, "-tags", "grpcnotrace", "-o", str(to), program.package]
    else:
        where = to.parent
        command = [go, "install", *flags, program.package]
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=where,
        env={
            **environ,
            **GO_ENVIRONMENT,
            "GOFLAGS": f"{environ.get('GOFLAGS', '')} {GO_FLAGS}".strip(),
            "GOBIN": str(to.parent),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output = _output(process, started, say)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise AssetError(
            f"could not build {name}; correct the cause below and run this again: "
            f"{' '.join(command)}\n{output[-4000:]}"
        )


def _output(process: subprocess.Popen[str], started: float, say: Callable[[str], None]) -> str:
    """Wait for the end of a build and return its output."""
    while True:
        try:
            return process.communicate(timeout=TELL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - started
            if seconds > BUILD_SECONDS:
                raise AssetError(
                    f"the build was stopped after {seconds:.0f} s, expected at most {BUILD_SECONDS:.0f} s:"
                    " run this again on a less busy machine; it continues from Go's cache"
                ) from None
            say(f"building, for {seconds:.0f} s now")


def _go(name: str, program: Program, environ: Mapping[str, str]) -> str:
    wanted = ".".join(map(str, GO_VERSION))
    way_out = f"install Go {wanted} or newer, or put {name} {program.wanted} on PATH or in KUBEBUILDER_ASSETS"
    go = shutil.which("go", path=environ.get("PATH"))
    if go is None:
        raise MissingError(f"Go, which would build {name}, is not on PATH: {way_out}")
    version = subprocess.run([go, "version"], capture_output=True, text=True, timeout=60, check=False).stdout
    match = re.search(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < GO_VERSION:
        raise MissingError(f"{version.strip() or go} is too old to build {name}: {way_out}")
    return go
