"""Installs missing programs, one at a time per machine, and reports each of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

from tools.assets import checksums
from tools.assets.build import BUILD_SECONDS, build
from tools.assets.download import UnavailableError, download
from tools.assets.lookup import architecture, build_inputs, cache_folder, cached, installed, pin_of, stamp
from tools.assets.programs import AssetError, MissingError, program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


def ensure(
    names: Iterable[str],
    environ: Mapping[str, str] | None = None,
    *,
    downloads: bool = True,
    without_go: bool = False,
) -> dict[str, Path]:
    """Return the path of each program; install programs that are missing.

    Parameters
    ----------
    names : iterable of str
        Keys of `PROGRAMS`.
    environ : mapping, optional
        Read as by `find`, and passed to Go; this process's environment by default.
    downloads : bool
        True to download pinned official files; False to build everything.
    without_go : bool
        True to omit programs that would have to be built if Go is missing.

    Raises
    ------
    AssetError
        A name is unknown, a file has a wrong checksum, or a program could not be built.
    """
    environ = os.environ if environ is None else environ
    names = list(names)
    announce(names, environ, downloads)
    found = {}
    for name in names:
        try:
            found[name] = _ensured(name, environ, downloads)
        except MissingError as problem:
            if not without_go:
                raise
            say(f"{problem}. The tests that start {name} are skipped")
    return found


def announce(names: Iterable[str], environ: Mapping[str, str], downloads: bool) -> None:
    """Print which programs will be built and how long the builds may take."""
    missing = [name for name in names if not (installed(name, environ) or cached(name, environ))]
    built = [name for name in missing if not (downloads and pin_of(name))]
    if built and shutil.which("go", path=environ.get("PATH")):
        minutes = max(1, round(sum(program(name).minutes for name in built)))
        say(
            f"building {', '.join(built)} from Go modules, once: about {minutes} minutes on "
            f"two idle cores with an empty cache; later runs find them in {cache_folder(environ)}"
        )


def _ensured(name: str, environ: Mapping[str, str], downloads: bool) -> Path:
    started = time.monotonic()
    path = installed(name, environ) or cached(name, environ)
    if path is not None:
        say(f"{name}: found at {path}", started)
        return path
    folder = cache_folder(environ)
    (folder / ".new").mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder / ".lock", name):
        # Another process may have installed the program in the meantime.
        return cached(name, environ) or _got(name, folder / name, environ, downloads)


def _got(name: str, path: Path, environ: Mapping[str, str], downloads: bool) -> Path:
    wanted, new, started = program(name), path.parent / ".new" / path.name, time.monotonic()
    arch, pin = architecture(), pin_of(name)
    reason = f"{checksums.FILE.name} has no checksum of {wanted.version} for this machine"
    if not downloads:
        reason = "that was asked for"
    elif arch and pin:
        try:
            say(f"{name} {wanted.version}: downloading {wanted.url(arch)}")
            download(name, wanted, arch, pin, new)
        except UnavailableError as problem:
            reason = str(problem)
        else:
            return _kept(name, new, path, pin, f"downloaded into {path.parent}", started)
    say(f"{name} {wanted.version}: building it from its Go module (minutes the first time), because {reason}")
    build(name, wanted, new, environ, lambda message: say(f"{name} {wanted.version}: {message}"))
    return _kept(name, new, path, build_inputs(wanted), f"built into {path.parent}", started)


def _kept(name: str, new: Path, path: Path, origin: str, done: str, started: float) -> Path:
    """Move a new program into the cache, and record the inputs from which it was made."""
    stamp(path).unlink(missing_ok=True)
    new.replace(path)
    stamp(path).write_text(origin)
    say(f"{name} {program(name).version}: {done}", started)
    return path


@contextlib.contextmanager
def _one_at_a_time(lock: Path, name: str) -> Iterator[None]:
    """Hold the cache's lock within the block; while waiting for it, print which process holds it."""
    with lock.open("a+") as file:
        started, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = lock.read_text().strip() or "another process"
                if time.monotonic() - started > BUILD_SECONDS:
                    raise AssetError(
                        f"waited {BUILD_SECONDS:g} s to get {name}, for {holder}, which holds {lock}: "
                        "end that process if it is stuck"
                    ) from None
                if not told:
                    say(f"{name}: waiting until {holder} has got its own")
                    told = True
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def say(message: str, started: float | None = None) -> None:
    """Print a line that begins with the time since `started`."""
    took = "" if started is None else f" ({time.monotonic() - started:.1f} s)"
    print(f"assets: {message}{took}", file=sys.stderr, flush=True)
