"""The pinned checksums of official files, one line per program and architecture in ``assets.lock``.

Only ``python -m tools.assets --pin`` writes the file, from downloaded files. A line applies only to the
version that it names, so a new version is unpinned until the command is run again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tools.assets.programs import AssetError, Program

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path(__file__).resolve().parents[1] / "assets.lock"
HEADER = "# Official downloads by sha256. Written by `python -m tools.assets --pin`; never by hand.\n"
LINE = re.compile(r"(?P<what>\S+ \S+ linux/\S+) sha256:(?P<sha256>[0-9a-f]{64})")


def key(name: str, program: Program, arch: str) -> str:
    """Return the part of a line that precedes the checksum.

    >>> from tools.assets.programs import PROGRAMS
    >>> key("kwok", PROGRAMS["kwok"], "arm64")
    'kwok 0.8.0 linux/arm64'
    """
    return f"{name} {program.version} linux/{arch}"


def read(file: Path) -> dict[str, str]:
    """Return the checksums by `key`; raise an `AssetError` that names the first invalid line, if any."""
    pins: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise AssetError(
                f"{file}, line {number}: {line!r} is no 'NAME VERSION linux/PROCESSOR sha256:…': "
                "restore the file, or write it anew by `python -m tools.assets --pin`"
            )
        pins[match["what"]] = match["sha256"]
    return pins


def write(file: Path, pins: Mapping[str, str]) -> None:
    """Write the checksums to the lock file, sorted by key."""
    lines = (f"{what} sha256:{sha256}\n" for what, sha256 in sorted(pins.items()))
    file.write_text(HEADER + "".join(lines))
