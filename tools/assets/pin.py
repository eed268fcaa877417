"""Pins the checksums of official files; run manually on a machine that can download the files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tools.assets import checksums
from tools.assets.download import UnavailableError, fetch, unpack
from tools.assets.programs import ARCHITECTURES, PROGRAMS, AssetError, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ELF = b"\x7fELF"


def pin(names: Iterable[str], say: Callable[[str], None]) -> None:
    """Download each program's official file for every architecture, and write the checksums.

    Raises
    ------
    AssetError
        A file could not be downloaded, or does not contain a Linux program. Nothing is written then.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for arch in ARCHITECTURES.values():
                what = checksums.key(name, program(name), arch)
                say(f"{what}: downloading {program(name).url(arch)}")
                found[what] = _checksum(name, arch, Path(folder))
    current = {
        checksums.key(name, each, arch)
        for name, each in PROGRAMS.items()
        if each.download
        for arch in ARCHITECTURES.values()
    }
    kept = {what: sha256 for what, sha256 in checksums.read(checksums.FILE).items() if what in current}
    checksums.write(checksums.FILE, kept | found)
    say(f"wrote {len(found)} checksums into {checksums.FILE}: look at the change, and commit it")


def _checksum(name: str, arch: str, folder: Path) -> str:
    """Return the checksum of an official file after checking that it contains a Linux program."""
    url = program(name).url(arch)
    file, unpacked = folder / "file", folder / name
    try:
        sha256 = fetch(url, file)
    except UnavailableError as problem:
        raise AssetError(f"{problem}. No checksum was written: run this where downloads work") from problem
    unpack(file, program(name).path_inside(arch), unpacked)
    with unpacked.open("rb") as opened:
        start = opened.read(len(ELF))
    if start != ELF:
        raise AssetError(
            f"{url} begins with {start!r} and is no program for Linux. No checksum was written: "
            "see in a browser what that address gives"
        )
    return sha256
