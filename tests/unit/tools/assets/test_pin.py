"""Checksums come from files that were downloaded and hold a program, and from nowhere else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.download_site import ELF, DownloadSite, tar_gz
from tools import assets
from tools.assets import __main__ as command
from tools.assets import checksums
from tools.assets.programs import ARCHITECTURES, PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMITTED = Path("tools/assets.lock")


@pytest.fixture
def published(site: DownloadSite) -> Mapping[str, bytes]:
    """Both programs for both processors, by what the lines of the file say."""
    site.files = {
        f"/{name}": content
        for arch in ARCHITECTURES.values()
        for name, content in (
            (f"kwok-0.8.0-{arch}", ELF + arch.encode()),
            (f"etcd-3.6.5-{arch}.tar.gz", tar_gz(f"etcd-3.6.5/{arch}/etcd", ELF + arch.encode())),
        )
    }
    return {
        f"{name} {version} linux/{arch}": site.files[f"/{name}-{version}-{arch}{suffix}"]
        for arch in ARCHITECTURES.values()
        for name, version, suffix in (("kwok", "0.8.0", ""), ("etcd", "3.6.5", ".tar.gz"))
    }


def test_it_writes_the_checksum_of_every_file(published: Mapping[str, bytes]):
    checksums.write(checksums.FILE, {"kwok 0.7.0 linux/amd64": "0" * 64, "helm 1.0.0 linux/amd64": "0" * 64})
    assert command.main(["--pin", "kwok", "etcd"]) == 0
    assert checksums.read(checksums.FILE) == {
        what: hashlib.sha256(content).hexdigest() for what, content in published.items()
    }


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("served", "says"),
    [
        pytest.param(None, "HTTP Error 404", id="not-found"),
        pytest.param(b"<html>Sign in", "is no program for Linux", id="a-page-in-its-place"),
    ],
)
def test_what_is_no_program_is_never_pinned(
    site: DownloadSite, capsys: pytest.CaptureFixture[str], served: bytes | None, says: str
):
    del site.files["/kwok-0.8.0-arm64"]
    if served is not None:
        site.files["/kwok-0.8.0-arm64"] = served
    assert command.main(["--pin", "kwok"]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert "No checksum was written" in said
    assert checksums.read(checksums.FILE) == {}


def test_a_line_that_is_no_checksum_is_named(lock: Path):
    lock.write_text(f"{checksums.HEADER}kwok 0.8.0 linux/amd64 sha256:abc\n")
    with pytest.raises(assets.AssetError, match=r"assets\.lock, line 2: 'kwok .* write it anew"):
        checksums.read(lock)


def test_the_committed_checksums_are_all_there_or_none():
    written = checksums.read(COMMITTED)
    wanted = {
        checksums.key(name, program, arch)
        for name, program in PROGRAMS.items()
        if program.download
        for arch in ARCHITECTURES.values()
    }
    assert written.keys() in (set(), wanted), "write them anew: `python -m tools.assets --pin`"
    assert COMMITTED.read_text().startswith(checksums.HEADER)
