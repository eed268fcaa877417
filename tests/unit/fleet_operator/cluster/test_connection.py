from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleet_operator.cluster.connection import Connection, ConnectionSettingsError, from_pod
from tests.support.certificates import make_authority

if TYPE_CHECKING:
    from pathlib import Path

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def account(folder: Path) -> Path:
    for name in ("namespace", "token"):
        (folder / name).write_text(f"the {name}\n")
    (folder / "ca.crt").write_bytes(make_authority(folder / "authority").certificate.read_bytes())
    return folder


def test_credentials_are_not_shown():
    shown = repr(Connection("https://a", authorization=lambda: "secret", proxy="http://me:password@proxy"))
    assert "secret" not in shown
    assert "password" not in shown


@pytest.mark.parametrize(
    ("host", "expected"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_in_a_pod_the_service_account_is_used(tmp_path: Path, host: str, expected: str):
    found = from_pod(POD | {"KUBERNETES_SERVICE_HOST": host}, account(tmp_path))
    assert (found.server, found.namespace) == (expected, "the namespace")
    assert found.tls is not None
    assert len(found.tls.get_ca_certs()) == 1
    assert found.authorization() == "Bearer the token"
    (tmp_path / "token").write_text("the next\n")
    assert found.authorization() == "Bearer the next"


def test_in_a_pod_without_a_service_account_the_error_says_so(tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match="automountServiceAccountToken"):
        from_pod(POD, tmp_path / "nothing")


def test_a_certificate_that_is_none_is_told_in_a_sentence(tmp_path: Path):
    (account(tmp_path) / "ca.crt").write_text("none")
    with pytest.raises(ConnectionSettingsError, match=r"its service account cannot be read: .*certificate"):
        from_pod(POD, tmp_path)
