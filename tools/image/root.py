"""Builds the root file system of an image that can run the interpreter in /opt/fleet.

It runs in `docker build`. The base image has a shell, a package manager and parts of Python that the operator
never runs. Files that are not in an image need no updates, and are of no use to an attacker. Therefore only
the packages, the interpreter, its standard library, the shared libraries that these load, and certificates
are copied, each to the same path.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = Path("/opt/fleet")
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "config-*",
    "dist-packages", "site-packages", "__pycache__",
)  # fmt: skip
ALSO = (
    "/etc/ssl",
    "/usr/lib/ssl",
    "/usr/share/ca-certificates",
    "/etc/ld.so.cache",
    "/etc/os-release",
    "/usr/lib/os-release",
)


def copy(source: Path, root: Path) -> None:
    """Copy a file to the same path under `root`; a link is copied together with its target."""
    target = root / source.relative_to("/")
    if os.path.lexists(target):
        return
    # Debian's /lib is a link to /usr/lib, which `main` has made: the file is copied to its real path.
    real = source.parent.resolve() / source.name
    if real != source:
        copy(real, root)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        copy(source.parent / source.readlink(), root)
    else:
        shutil.copy2(source, target)


def libraries(files: list[Path]) -> set[Path]:
    """Return the paths of the dynamic linker and of all shared libraries that the given files need."""
    # ldd fails for a static program, which needs no libraries.
    output = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    if missing := re.findall(r"(\S+) => not found", output):
        raise SystemExit(
            f"ldd does not find {', '.join(sorted(set(missing)))}, which a program or a package loads:"
            " install the Debian packages with these libraries in the base image"
        )
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", output)}


def main(root: Path) -> None:
    """Build the root file system in the folder named on the command line."""
    root.mkdir()
    for link in Path("/").iterdir():
        if link.is_symlink():
            (root / link.name).symlink_to(link.readlink())
            (root / link.resolve().relative_to("/")).mkdir(parents=True, exist_ok=True)
    program = Path(PACKAGES, "bin", "python").resolve()
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    shutil.copytree(standard, root / standard.relative_to("/"), symlinks=True, ignore=LEFT_OUT)
    shutil.copytree(PACKAGES, root / PACKAGES.relative_to("/"), symlinks=True)
    native = [program, *standard.rglob("*.so"), *PACKAGES.rglob("*.so")]
    # The environment's python3 may be a link to a link of the base image, such as /usr/bin/python3.
    for each in [program, Path(PACKAGES, "bin", "python3").readlink(), *libraries(native)]:
        if each.is_absolute():
            copy(each, root)
    for name in ALSO:
        source = Path(name)
        target = root / source.relative_to("/")
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("private"))
        elif source.exists():
            copy(source, root)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("fleet:x:65532:65532:fleet:/nonexistent:/nonexistent\n")
    (root / "etc" / "group").write_text("fleet:x:65532:\n")
    (root / "etc" / "nsswitch.conf").write_text("hosts: files dns\n")
    # Containers run with a read-only root, where Python cannot keep its bytecode.
    subprocess.run(
        [program, "-m", "compileall", "-q", "-s", root, root / standard.relative_to("/")], check=False
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
