"""The programs that tests and the Makefile start: a Kubernetes control plane, kwok, kubectl, helm, kind.

Each is looked for in the folder that ``KUBEBUILDER_ASSETS`` names, then on ``PATH``, and taken from there if
its version will do. Any other is built from published Go modules, at the versions pinned here and in
``tools/go/*/go.mod``, into the user's cache, once: it is built again only when what it is built from has
changed. One build runs at a time on a machine, whoever asks for it. Only the standard library is used, so
that any Python from 3.11 on can run this file.

Usage::

    python tools/assets.py kubectl helm             # prints where each is, one a line
    export PATH="$(python tools/assets.py --path kind helm kubectl):$PATH"
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

KUBERNETES = "1.34.4"
ETCD = "3.6.5"
KWOK = "0.8.0"
HELM = "3.22.0"
KIND = "0.33.0"

GO_MODULES = Path(__file__).resolve().parent / "go"
GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
BUILD_SECONDS = 3600
"""The longest that one build may take, on a slow machine with empty caches."""


class AssetError(Exception):
    """A program was not found and could not be built; the message says what to do about it."""


def _kubernetes_flags() -> str:
    """Return the linker flags behind what ``kubectl version`` and the API server's /version report."""
    major, minor, _ = KUBERNETES.split(".")
    stamps = {
        "gitVersion": f"v{KUBERNETES}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "from-modules",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(f"-X {package}.{name}={value}" for package in packages for name, value in stamps.items())


@dataclass(frozen=True)
class Program:
    """One program: which versions will do, how to ask for them, and how it is built.

    Attributes
    ----------
    version : str
        The version that is built.
    precision : int
        How many leading parts of a found program's version must be equal to that.
    ask : tuple of str
        The arguments that make it print its version.
    package : str
        The Go package; with its version where it is built by its own go.mod.
    module : str, optional
        The folder of ``tools/go`` whose go.mod it is built by.
    flags : str
        Linker flags beside ``-s -w``.
    """

    version: str
    precision: int
    ask: tuple[str, ...]
    package: str
    module: str | None = None
    flags: str = ""


def _kubernetes(name: str, *ask: str) -> Program:
    return Program(KUBERNETES, 2, ask, f"k8s.io/kubernetes/cmd/{name}", "k8s", _kubernetes_flags())


PROGRAMS: Mapping[str, Program] = {
    "etcd": Program(ETCD, 2, ("--version",), "go.etcd.io/etcd/server/v3", "etcd"),
    "kube-apiserver": _kubernetes("kube-apiserver", "--version"),
    "kube-controller-manager": _kubernetes("kube-controller-manager", "--version"),
    "kube-scheduler": _kubernetes("kube-scheduler", "--version"),
    "kubectl": _kubernetes("kubectl", "version", "--client"),
    "kwok": Program(KWOK, 2, ("--version",), f"sigs.k8s.io/kwok/cmd/kwok@v{KWOK}"),
    "helm": Program(
        HELM,
        1,
        ("version", "--short"),
        f"helm.sh/helm/v3/cmd/helm@v{HELM}",
        flags=f"-X helm.sh/helm/v3/internal/version.version=v{HELM}",
    ),
    "kind": Program(KIND, 1, ("version",), f"sigs.k8s.io/kind@v{KIND}"),
}


def find(names: Iterable[str], environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Return where each program is, building those that are nowhere.

    Parameters
    ----------
    names : iterable of str
        Keys of `PROGRAMS`.
    environ : mapping, optional
        Read for ``KUBEBUILDER_ASSETS``, ``PATH``, ``XDG_CACHE_HOME`` and ``HOME``; this process's if absent.

    Raises
    ------
    AssetError
        A name is unknown, Go is missing or too old, or a build failed.
    """
    environ = os.environ if environ is None else environ
    found: dict[str, Path] = {}
    for name in names:
        if name not in PROGRAMS:
            raise AssetError(f"no such program: {name}; there are {', '.join(sorted(PROGRAMS))}")
        found[name] = installed(name, environ) or built(name, environ)
    return found


def installed(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return a program that is there already in a version that will do, or None."""
    for folder in (environ.get("KUBEBUILDER_ASSETS"), *environ.get("PATH", "").split(os.pathsep)):
        path = Path(folder) / name if folder else None
        if path and os.access(path, os.X_OK) and path.is_file() and _will_do(path, PROGRAMS[name]):
            return path
    return None


def _will_do(path: Path, program: Program) -> bool:
    try:
        answer = subprocess.run(
            [path, *program.ask], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    wanted = re.escape(".".join(program.version.split(".")[: program.precision]))
    return re.search(rf"(?<![\d.])v?{wanted}\.\d", answer) is not None


def built(name: str, environ: Mapping[str, str]) -> Path:
    """Return a program in the cache, after building it if it is not there as it should be."""
    folder = cache_folder(environ)
    path, stamp = folder / name, folder / f".{name}.inputs"
    inputs = _inputs(PROGRAMS[name])
    if _is_built(path, stamp, inputs):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder / ".lock", name):
        if not _is_built(path, stamp, inputs):  # else another has built it while we waited
            _build(name, path, environ)
            stamp.write_text(inputs)
    return path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder that programs are built into."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "fleetjob" / "bin"


def _is_built(path: Path, stamp: Path, inputs: str) -> bool:
    return os.access(path, os.X_OK) and stamp.is_file() and stamp.read_text() == inputs


def _inputs(program: Program) -> str:
    """Return a name for everything that goes into a program."""
    digest = hashlib.sha256(repr(program).encode())
    if program.module:
        for file in sorted((GO_MODULES / program.module).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _one_at_a_time(lock: Path, name: str) -> Iterator[None]:
    """Hold the lock of the cache; say once who holds it if that is somebody else."""
    with lock.open("a+") as file:
        deadline, told = time.monotonic() + BUILD_SECONDS, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = lock.read_text().strip() or "another process"
                if time.monotonic() > deadline:
                    raise AssetError(
                        f"waited {BUILD_SECONDS} s to build {name} for {holder}, which holds {lock}"
                    ) from None
                if not told:
                    _say(f"waiting to build {name} until {holder} has done its own build")
                    told = True
                time.sleep(0.5)
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _build(name: str, path: Path, environ: Mapping[str, str]) -> None:
    program = PROGRAMS[name]
    go = _go(name, program, environ)
    flags = ["-trimpath", "-ldflags", f"-s -w {program.flags}"]
    new = path.parent / ".new"
    new.mkdir(exist_ok=True)
    if program.module:
        where = GO_MODULES / program.module
        command = [go, "build", *flags, "-tags", "grpcnotrace", "-o", str(new / name), program.package]
    else:
        where = path.parent
        command = [go, "install", *flags, program.package]
    _say(f"building {name} {program.version} from its Go module (minutes the first time) into {path.parent}")
    started = time.monotonic()
    ended = subprocess.run(
        command,
        cwd=where,
        env={**environ, **GO_ENVIRONMENT, "GOBIN": str(new)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if ended.returncode != 0:
        raise AssetError(f"could not build {name}: {' '.join(command)}\n{ended.stdout[-4000:]}")
    (new / name).replace(path)
    _say(f"built {name} in {time.monotonic() - started:.0f} s")


def _go(name: str, program: Program, environ: Mapping[str, str]) -> str:
    wanted = ".".join(program.version.split(".")[: program.precision])
    way_out = f"install Go 1.26 or newer, or put {name} {wanted} on PATH or in KUBEBUILDER_ASSETS"
    go = shutil.which("go", path=environ.get("PATH"))
    if go is None:
        raise AssetError(f"{name} was not found and Go, which would build it, is not on PATH: {way_out}")
    version = subprocess.run([go, "version"], capture_output=True, text=True, timeout=60, check=False).stdout
    match = re.search(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < (1, 26):
        raise AssetError(
            f"{name} was not found and {version.strip() or go} is too old to build it: {way_out}"
        )
    return go


def _say(message: str) -> None:
    print(f"assets: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Run as a program; return its exit status."""
    parser = argparse.ArgumentParser(description="Find the programs that tests start, or build them.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(PROGRAMS)}; all if none is named"
    )
    parser.add_argument(
        "--path", action="store_true", help="print the folders that hold them, as PATH wants it"
    )
    arguments = parser.parse_args()
    try:
        found = find(arguments.names or PROGRAMS)
    except AssetError as error:
        _say(str(error))
        return 1
    if arguments.path:
        print(os.pathsep.join(dict.fromkeys(str(path.parent) for path in found.values())))
    else:
        print(*found.values(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
