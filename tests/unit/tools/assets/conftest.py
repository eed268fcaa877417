"""A machine without programs, a file without checksums, and a site that publishes two programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.bare_machine import BareMachine
from tests.support.download_site import DownloadSite
from tools.assets import checksums, download
from tools.assets.programs import PROGRAMS, Program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path)


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file in the place of the committed checksums."""
    file = tmp_path / "assets.lock"
    checksums.write(file, {})
    monkeypatch.setattr(checksums, "FILE", file)
    return file


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[DownloadSite]:
    """A site that publishes kwok as it is, and etcd in an archive."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with DownloadSite() as running:
        publish(monkeypatch, running.url)
        download._no_connection.cache_clear()
        yield running
    download._no_connection.cache_clear()


def publish(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    kwok = Program("0.8.0", 2, ("--version",), f"{url}/kwok-{{version}}-{{arch}}", "example.dev/kwok@v0.8.0")
    etcd = Program(
        "3.6.5",
        2,
        ("--version",),
        f"{url}/etcd-{{version}}-{{arch}}.tar.gz",
        "example.dev/etcd@v3.6.5",
        member="etcd-{version}/{arch}/etcd",
    )
    monkeypatch.setitem(PROGRAMS, "kwok", kwok)
    monkeypatch.setitem(PROGRAMS, "etcd", etcd)
