"""The files of FLEET_TLS_DIR: what cannot be used is named, with what to do."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.errors import ConfigurationError
from fleet.parameter_server.certificates import Certificates, certificates_of
from fleet.parameter_server.settings import Settings
from tests.support.certificates import Authority, make_authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


def missing(folder: Path) -> None:
    (folder / "ca.crt").unlink()


def of_another_key(folder: Path) -> None:
    key = (folder / "tls.key").read_bytes()
    make_authority(folder / "other").issue(folder / "others")
    assert (folder / "others" / "tls.key").read_bytes() != key
    (folder / "tls.key").write_bytes((folder / "others" / "tls.key").read_bytes())


def of_another_authority(folder: Path) -> None:
    other = make_authority(folder / "other")
    (folder / "ca.crt").write_bytes(other.certificate.read_bytes())


def encrypted(folder: Path) -> None:
    kept = folder / "kept.key"
    (folder / "tls.key").rename(kept)
    command = [
        "openssl",
        "pkcs8",
        "-topk8",
        "-in",
        kept,
        "-out",
        folder / "tls.key",
        "-passout",
        "pass:secret",
    ]
    subprocess.run([str(each) for each in command], check=True, timeout=60)


def no_certificate(folder: Path) -> None:
    (folder / "tls.crt").write_text("-----BEGIN")


def no_authority(folder: Path) -> None:
    (folder / "ca.crt").write_text("nothing")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (missing, "ca.crt .FLEET_TLS_DIR. cannot be read: No such file or directory; expected a file in PEM"),
        (
            of_another_key,
            "tls.key .FLEET_TLS_DIR. is not the key of tls.crt; expected a certificate and a key",
        ),
        (of_another_authority, "tls.crt .FLEET_TLS_DIR. is refused with ca.crt: unable to get local issuer"),
        (encrypted, "tls.key .FLEET_TLS_DIR. is encrypted; expected a key without a passphrase"),
        (no_certificate, "tls.crt .FLEET_TLS_DIR. and tls.key hold no certificate with its key"),
        (no_authority, "ca.crt .FLEET_TLS_DIR. holds no certificate; expected the authority's, in PEM"),
    ],
)
def test_files_that_cannot_be_used(
    authority: Authority, tmp_path: Path, spoil: Callable[[Path], None], expected: str
):
    folder = authority.issue(tmp_path)
    spoil(folder)
    with pytest.raises(ConfigurationError, match=expected):
        certificates_of(Settings(tls_dir=str(folder)))


@pytest.mark.parametrize(
    ("days", "usages", "expected"),
    [
        pytest.param(-1, "serverAuth,clientAuth", "certificate has expired", id="expired"),
        pytest.param(1, "serverAuth", "unsuitable certificate purpose", id="for-servers-only"),
        pytest.param(1, "clientAuth", "unsuitable certificate purpose", id="for-clients-only"),
    ],
)
def test_certificates_that_nobody_would_take(
    authority: Authority, tmp_path: Path, days: int, usages: str, expected: str
):
    folder = authority.issue(tmp_path, days=days, usages=usages)
    with pytest.raises(
        ConfigurationError, match=f"{expected}; expected a currently valid certificate, issued"
    ):
        certificates_of(Settings(tls_dir=str(folder)))


def test_a_file_of_another_user_is_named_with_how_a_pod_may_read_it(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = authority.issue(tmp_path)

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)  # the superuser, who runs tests, may read any file
    with pytest.raises(ConfigurationError, match="a runAsUser or fsGroup that can"):
        certificates_of(Settings(tls_dir=str(folder)))


def test_without_the_variable_there_are_none():
    assert certificates_of(Settings.from_environ({})) is None


def test_unchanged_files_are_read_once(authority: Authority, tmp_path: Path):
    certificates = Certificates(authority.issue(tmp_path))
    assert certificates.current() is certificates.current()


def test_the_key_is_shown_nowhere(authority: Authority, tmp_path: Path):
    loaded = Certificates(authority.issue(tmp_path)).current()
    assert "PRIVATE KEY" in loaded.key.decode()
    assert "PRIVATE KEY" not in repr(loaded)


NAMES = ("tls.crt", "tls.key", "ca.crt")


def link(folder: Path, to: Path) -> Path:
    """Lay files into a folder as the kubelet does: their names stay links into one that is replaced whole."""
    (folder / "..data").symlink_to(to)
    for name in NAMES:
        (folder / name).symlink_to(Path("..data") / name)
    return folder


def exchange(folder: Path, to: Path) -> None:
    (folder / "..new").symlink_to(to)
    (folder / "..new").rename(folder / "..data")


def test_files_that_are_exchanged_by_a_link_are_read_again(authority: Authority, tmp_path: Path):
    first, second = authority.issue(tmp_path / "..1"), authority.issue(tmp_path / "..2")
    certificates = Certificates(link(tmp_path, first))
    assert certificates.current().certificate == (first / "tls.crt").read_bytes()
    exchange(tmp_path, second)
    assert certificates.current().certificate == (second / "tls.crt").read_bytes()


@pytest.mark.parametrize("amid", ["_read", "_fill"])
def test_of_files_that_are_exchanged_amid_being_read_all_are_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid: str
):
    first = make_authority(tmp_path / "one").issue(tmp_path / "..1")
    second = make_authority(tmp_path / "other").issue(tmp_path / "..2")
    link(tmp_path, first)
    whole = getattr(Certificates, amid)

    def and_then_exchanges(self: Certificates, what: object) -> object:
        done = whole(self, what)
        if (tmp_path / "..data").resolve() == first.resolve():
            exchange(tmp_path, second)
        return done

    monkeypatch.setattr(Certificates, amid, and_then_exchanges)
    loaded = Certificates(tmp_path).current()
    assert [loaded.certificate, loaded.key, loaded.authority] == [
        (second / name).read_bytes() for name in NAMES
    ]
