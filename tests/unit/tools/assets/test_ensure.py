"""What is nowhere is downloaded where that works, and built where not; a stand-in site shows the first."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.download_site import ELF, DownloadSite, tar_gz
from tools import assets
from tools.assets import build, checksums, download, lookup
from tools.assets.programs import PROGRAMS, Program

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.bare_machine import BareMachine

pytestmark = pytest.mark.timeout(30)

ARCH = lookup.architecture()
KWOK = ELF + b"kwok" * 1000
ETCD = tar_gz(f"etcd-3.6.5/{ARCH}/etcd", ELF + b"etcd")


def pin(name: str, content: bytes) -> None:
    """Have the checksum of a content in the file of checksums."""
    what = checksums.key(name, PROGRAMS[name], str(ARCH))
    sha256 = hashlib.sha256(content).hexdigest()
    checksums.write(checksums.FILE, {**checksums.read(checksums.FILE), what: sha256})


@pytest.fixture
def pinned(site: DownloadSite) -> DownloadSite:
    """The site with both of its programs, each pinned."""
    site.files = {f"/kwok-0.8.0-{ARCH}": KWOK, f"/etcd-3.6.5-{ARCH}.tar.gz": ETCD}
    pin("kwok", KWOK)
    pin("etcd", ETCD)
    return site


# --- built ------------------------------------------------------------------------------------------


def test_without_a_checksum_it_is_built_once_and_says_so(
    machine: BareMachine, site: DownloadSite, capsys: pytest.CaptureFixture[str]
):
    machine.put_go()
    for _ in range(2):
        assert assets.ensure(["kwok"], machine.environ) == {"kwok": machine.cache / "kwok"}
        assert os.access(machine.cache / "kwok", os.X_OK)
    assert assets.find(["kwok"], machine.environ) == {"kwok": machine.cache / "kwok"}
    assert len(machine.builds) == 1
    assert "example.dev/kwok@v0.8.0" in machine.builds[0]
    assert not site.asked
    told, building, built, found = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"assets: building kwok from Go modules, once: about 1 minutes on .*", told)
    assert re.fullmatch(
        r"assets: kwok 0\.8\.0: building .*, because assets\.lock has no checksum .*", building
    )
    assert re.fullmatch(rf"assets: kwok 0\.8\.0: built into {machine.cache} \(\d+\.\d s\)", built)
    assert re.fullmatch(rf"assets: kwok: found at {machine.cache}/kwok \(\d+\.\d s\)", found)


def test_without_go_what_is_there_is_found_and_the_rest_is_left_out(
    machine: BareMachine, capsys: pytest.CaptureFixture[str]
):
    etcd = machine.put_program("etcd", "etcd Version: 3.6.5")
    assert assets.ensure(["etcd", "kwok"], machine.environ, without_go=True) == {"etcd": etcd}
    assert "The tests that start kwok are skipped" in capsys.readouterr().err
    with pytest.raises(assets.MissingError, match="Go, which would build kwok, is not on PATH"):
        assets.ensure(["etcd", "kwok"], machine.environ)


def test_a_build_that_takes_long_says_that_it_goes_on(
    tmp_path: Path, machine: BareMachine, monkeypatch: pytest.MonkeyPatch
):
    told, said = tmp_path / "told", []

    def say(message: str) -> None:
        said.append(message)
        told.touch()

    machine.put_go(first=f"until [ -e {told} ]; do sleep 0.01; done")
    monkeypatch.setattr(build, "TELL_SECONDS", 0.05)
    build.build("kwok", PROGRAMS["kwok"], tmp_path / "kwok", machine.environ, say)
    assert re.fullmatch(r"building, for \d+ s now", said[0])


def test_the_users_cache_folder_counts(tmp_path: Path, machine: BareMachine):
    machine.put_go()
    machine.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    assert assets.ensure(["etcd"], machine.environ)["etcd"].parent == tmp_path / "cache" / "fleetjob" / "bin"


def test_a_program_is_built_again_when_what_it_is_built_from_has_changed(
    machine: BareMachine, monkeypatch: pytest.MonkeyPatch
):
    machine.put_go()
    assets.ensure(["kwok"], machine.environ)
    newer = Program("0.9.0", 2, ("--version",), PROGRAMS["kwok"].download, "example.dev/kwok@v0.9.0")
    monkeypatch.setitem(PROGRAMS, "kwok", newer)
    with pytest.raises(assets.AssetError, match=r"kwok 0\.9: neither"):
        assets.find(["kwok"], machine.environ)
    assets.ensure(["kwok"], machine.environ)
    assert len(machine.builds) == 2


def test_two_that_ask_at_once_make_one_build(machine: BareMachine):
    machine.put_go()
    asking = [threading.Thread(target=assets.ensure, args=(["kwok"], machine.environ)) for _ in range(3)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert len(machine.builds) == 1


def test_the_user_s_flags_of_go_count_beside_ours(machine: BareMachine, tmp_path: Path):
    machine.put_go(first=f'echo "$GOFLAGS" > {tmp_path / "flags"}')
    assets.ensure(["kwok"], {**machine.environ, "GOFLAGS": "-p=1"})
    assert (tmp_path / "flags").read_text() == "-p=1 -buildvcs=false\n"


def test_a_build_that_fails_says_what_go_said(machine: BareMachine):
    machine.put_go(first="echo no such module; exit 1")
    with pytest.raises(assets.AssetError, match=r"could not build kwok(.|\n)*no such module"):
        assets.ensure(["kwok"], machine.environ)


def test_without_go_the_error_gives_the_ways_out(machine: BareMachine):
    with pytest.raises(
        assets.AssetError, match=r"Go 1\.26.*or put etcd 3\.6 on PATH or in KUBEBUILDER_ASSETS"
    ):
        assets.ensure(["etcd"], {**machine.environ, "PATH": "/nowhere"})


def test_an_old_go_is_refused(machine: BareMachine):
    machine.put_go(version="go1.21.0")
    with pytest.raises(assets.AssetError, match=r"go1\.21\.0.* is too old"):
        assets.ensure(["kwok"], machine.environ)


# --- downloaded -------------------------------------------------------------------------------------


def test_what_is_pinned_is_downloaded_once_without_go(
    machine: BareMachine, pinned: DownloadSite, capsys: pytest.CaptureFixture[str]
):
    for _ in range(2):
        found = assets.ensure(["etcd", "kwok"], machine.environ)
    assert found["etcd"].read_bytes() == ELF + b"etcd"
    assert found["kwok"].read_bytes() == KWOK
    assert all(os.access(path, os.X_OK) for path in found.values())
    assert pinned.asked == [f"/etcd-3.6.5-{ARCH}.tar.gz", f"/kwok-0.8.0-{ARCH}"]
    said = capsys.readouterr().err
    assert f"assets: kwok 0.8.0: downloading {pinned.url}/kwok-0.8.0-{ARCH}\n" in said
    assert re.search(rf"assets: kwok 0\.8\.0: downloaded into {machine.cache} \(\d+\.\d s\)\n", said)
    assert sorted(path.name for path in (machine.cache / ".new").iterdir()) == []


def test_what_was_built_before_it_was_pinned_stays(machine: BareMachine, site: DownloadSite):
    machine.put_go()
    assets.ensure(["kwok"], machine.environ)
    pin("kwok", KWOK)
    assets.ensure(["kwok"], machine.environ)
    assert not site.asked


def test_a_machine_may_ask_for_builds_only(machine: BareMachine, pinned: DownloadSite):
    machine.put_go()
    assets.ensure(["kwok"], machine.environ, downloads=False)
    assert machine.builds
    assert not pinned.asked


def test_a_wrong_checksum_is_an_error_and_never_leads_to_a_build(machine: BareMachine, pinned: DownloadSite):
    machine.put_go()
    pin("etcd", b"another")
    found, expected = (hashlib.sha256(content).hexdigest() for content in (ETCD, b"another"))
    with pytest.raises(assets.AssetError) as error:
        assets.ensure(["etcd"], machine.environ)
    for part in (f"sha256 {found}, expected {expected}", "python -m tools.assets --build etcd", pinned.url):
        assert part in str(error.value)
    assert not machine.builds
    assert [path for path in machine.cache.rglob("*") if "etcd" in path.name] == []


def test_an_archive_without_the_program_is_an_error(machine: BareMachine, site: DownloadSite):
    wrong = tar_gz("elsewhere/etcd", b"")
    site.files = {f"/etcd-3.6.5-{ARCH}.tar.gz": wrong}
    pin("etcd", wrong)
    with pytest.raises(assets.AssetError, match=rf"should hold etcd-3\.6\.5/{ARCH}/etcd"):
        assets.ensure(["etcd"], machine.environ)


@pytest.mark.parametrize(
    ("goes_wrong", "because"),
    [
        pytest.param(lambda site: site.files.clear(), r"HTTP Error 404", id="not-found"),
        pytest.param(
            lambda site: setattr(site, "truncated", True), r"ended after 2002 of 4004 bytes", id="truncated"
        ),
        pytest.param(lambda site: setattr(site, "stalled", True), r"timed out", id="stalled"),
    ],
)
def test_what_the_network_fails_to_give_is_built(
    machine: BareMachine,
    pinned: DownloadSite,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    goes_wrong,
    because: str,
):
    monkeypatch.setattr(download, "STALL_SECONDS", 0.2)
    machine.put_go()
    goes_wrong(pinned)
    assets.ensure(["kwok"], machine.environ)
    assert pinned.asked
    assert machine.builds
    assert re.search(rf"building it from its Go module .* because .*{because}", capsys.readouterr().err)


@pytest.mark.parametrize("connects", ["refused", "unanswered", "unresolved"])
def test_without_a_connection_all_is_built_after_one_try(
    machine: BareMachine,
    pinned: DownloadSite,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    connects: str,
):
    machine.put_go()
    monkeypatch.setattr(download, "CONNECT_SECONDS", 0.2)
    tried: list[tuple[str, int]] = []
    hanging = threading.Event()

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address)
        if connects == "refused":
            raise ConnectionRefusedError("refused")
        hanging.wait(timeout if connects == "unanswered" else 30)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    started = time.monotonic()
    assets.ensure(["etcd", "kwok"], machine.environ)
    hanging.set()
    assert time.monotonic() - started < 10
    assert len(tried) == 1
    assert len(machine.builds) == 2
    assert len(re.findall(r"because no connection to 127\.0\.0\.1", capsys.readouterr().err)) == 2
    assert not pinned.asked
