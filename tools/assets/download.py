"""Downloads official files and verifies their checksums.

A failure of the network (no connection, an error status, a truncated file) raises `UnavailableError`; the
program is then built from its Go module. A complete file with a wrong checksum raises `AssetError`, because a
person must investigate it.
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import queue
import shutil
import socket
import tarfile
import threading
import time
import urllib.request
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from tools.assets import checksums
from tools.assets.programs import AssetError, Program

if TYPE_CHECKING:
    from pathlib import Path

CONNECT_SECONDS = 3.0
"""The time limit of a connection attempt, including the look-up of the host name."""
STALL_SECONDS = 30.0
"""The time limit for an open connection that receives nothing."""
DOWNLOAD_SECONDS = 900.0
"""The time limit for one file."""
PIECE_BYTES = 1 << 18


class UnavailableError(Exception):
    """A download failed; the message gives the reason."""


def download(name: str, program: Program, arch: str, sha256: str, to: Path) -> None:
    """Download a program's official file, and write the executable program to `to`.

    Raises
    ------
    UnavailableError
        The file could not be downloaded.
    AssetError
        The file has a wrong checksum, or does not contain the program; it is deleted.
    """
    url = program.url(arch)
    file = to.with_name(f"{to.name}.part")
    try:
        found = fetch(url, file)
        if found != sha256:
            raise AssetError(
                f"{name} {program.version}: {url} gave a file with sha256 {found}, expected {sha256} "
                f"({checksums.FILE.name}). The file was deleted. If something between here and there answers "
                "in the site's place, set HTTPS_PROXY, or build the program: "
                f"`python -m tools.assets --build {name}`. If the project has replaced its file, find out "
                "why before anybody pins it anew."
            )
        unpack(file, program.path_inside(arch), to)
    finally:
        file.unlink(missing_ok=True)
    to.chmod(0o755)


def fetch(url: str, file: Path) -> str:
    """Download a URL to a file and return its SHA-256 digest; raise `UnavailableError` on failure."""
    if problem := _no_connection(*_first_hop(url)):
        raise UnavailableError(problem)
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    digest, received = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=STALL_SECONDS) as response, file.open("wb") as out:  # noqa: S310
            announced = response.length
            while piece := response.read1(PIECE_BYTES):
                digest.update(piece)
                received += out.write(piece)
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{url} gave {received} bytes within {DOWNLOAD_SECONDS:g} s, not all"
                    )
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"{url}: {error or type(error).__name__}") from error
    if announced is not None and received != announced:
        raise UnavailableError(f"{url} ended after {received} of {announced} bytes")
    return digest.hexdigest()


def unpack(file: Path, member: str | None, to: Path) -> None:
    """Extract the program from an archive; if `member` is None, the file itself is the program."""
    if member is None:
        file.replace(to)
        return
    try:
        with tarfile.open(file, "r:gz") as archive, to.open("wb") as out:
            shutil.copyfileobj(_opened(archive, member), out)
    except (tarfile.TarError, EOFError, OSError, KeyError) as error:
        to.unlink(missing_ok=True)
        raise AssetError(
            f"the archive of {to.name} should hold {member}, but could not be unpacked: {error}; correct the"
            " path in tools/assets/programs.py"
        ) from error


def _opened(archive: tarfile.TarFile, member: str) -> IO[bytes]:
    inside = archive.extractfile(member)
    if inside is None:
        raise KeyError(f"{member} is no file")
    return inside


def _first_hop(url: str) -> tuple[str, int]:
    """Return the host and port of a connection's first hop: a proxy if one is set, else the server."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.netloc):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


@functools.cache
def _no_connection(host: str, port: int) -> str:
    """Return why a host cannot be reached in time, or an empty string if it can; each host is checked once.

    The connection is made in a thread, because the look-up of a host name has no time limit.
    """
    answer: queue.SimpleQueue[str] = queue.SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
        except OSError as error:
            answer.put(f"no connection to {host}: {error}")
        else:
            answer.put("")

    threading.Thread(target=connect, daemon=True).start()
    try:
        return answer.get(timeout=CONNECT_SECONDS)
    except queue.Empty:
        return f"no connection to {host} within {CONNECT_SECONDS:g} s"
