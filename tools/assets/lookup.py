"""Finds installed programs; never downloads or builds any, because fixtures have a time limit."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tools.assets import checksums
from tools.assets.programs import ARCHITECTURES, MissingError, Program, program

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GO_MODULES = Path(__file__).resolve().parents[1] / "go"


def find(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Return the path of each program; raise `MissingError` if any of them is missing.

    Parameters
    ----------
    names : iterable of str
        Keys of `PROGRAMS`.
    environ : mapping, optional
        The environment with ``KUBEBUILDER_ASSETS``, ``PATH``, ``XDG_CACHE_HOME`` and ``HOME``; this process's
        own by default.

    Raises
    ------
    AssetError
        A name is unknown.
    MissingError
        A program is missing; the message names all missing programs.
    """
    environ = os.environ if environ is None else environ
    found = {name: installed(name, environ) or cached(name, environ) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        named = any(program(name).by_name for name in missing)
        command = f"python -m tools.assets {' '.join(missing)}" if named else "make assets"
        raise MissingError(
            f"{', '.join(f'{name} {program(name).wanted}' for name in missing)}: neither in "
            f"KUBEBUILDER_ASSETS nor on PATH nor in {cache_folder(environ)}; run `{command}`, which gets them"
        )
    return {name: path for name, path in found.items() if path is not None}


def installed(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return a program of a suitable version that is already installed on this machine, or None."""
    wanted = program(name)
    for folder in (environ.get("KUBEBUILDER_ASSETS"), *environ.get("PATH", "").split(os.pathsep)):
        path = Path(folder) / name if folder else None
        if path and os.access(path, os.X_OK) and path.is_file() and _will_do(path, wanted):
            return path
    return None


def _will_do(path: Path, wanted: Program) -> bool:
    if not wanted.ask:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return content.find(f"\t{wanted.go_module}\tv{wanted.wanted}.".encode()) >= 0
        except (OSError, ValueError):  # unreadable or empty
            return False
    try:
        answer = subprocess.run(
            [path, *wanted.ask], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return re.search(rf"(?<![\d.])v?{re.escape(wanted.wanted)}\.\d", answer) is not None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for programs that were downloaded or built."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "fleetjob" / "bin"


def cached(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return a cached program, or None if its version or its inputs are out of date."""
    path = cache_folder(environ) / name
    try:
        origin = stamp(path).read_text()
    except FileNotFoundError:
        return None
    is_current = origin in {pin_of(name), build_inputs(program(name))}
    return path if is_current and os.access(path, os.X_OK) else None


def stamp(path: Path) -> Path:
    """Return the path of the file that records the inputs of a cached program."""
    return path.with_name(f".{path.name}.inputs")


def architecture() -> str | None:
    """Return the upstream name of this machine's architecture, or None if no downloads are pinned for it."""
    system = os.uname()
    return ARCHITECTURES.get(system.machine) if system.sysname == "Linux" else None


def pin_of(name: str) -> str | None:
    """Return the pinned checksum of a program's official file for this machine, or None."""
    arch = architecture()
    return checksums.read(checksums.FILE).get(checksums.key(name, program(name), arch)) if arch else None


def build_inputs(wanted: Program) -> str:
    """Return a string that identifies all inputs from which a program is built."""
    digest = hashlib.sha256(repr((wanted.package, wanted.version, wanted.module, wanted.flags)).encode())
    if wanted.module:
        for file in sorted((GO_MODULES / wanted.module).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
