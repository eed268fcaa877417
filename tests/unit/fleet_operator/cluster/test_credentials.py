"""Programs that a kubeconfig names for credentials."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.cluster.credentials import CredentialsError, ExecPlugin

if TYPE_CHECKING:
    from pathlib import Path


def plugin(folder: Path, script: str, **config: Any) -> ExecPlugin:
    program = folder / "sign-in"
    program.write_text(f"#!/bin/sh\necho asked >>{folder}/asked\n{script}\n")
    program.chmod(0o755)
    return ExecPlugin({"command": "./sign-in", **config}, folder)


def says(status: Any) -> str:
    return f"echo '{json.dumps({'kind': 'ExecCredential', 'status': status})}'"


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines())


def in_minutes(minutes: float) -> str:
    return (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_token_is_kept_until_it_expires(tmp_path: Path):
    found = plugin(tmp_path, says({"token": "one", "expirationTimestamp": in_minutes(30)}))
    assert [found.token(), found.token()] == ["one", "one"]
    assert asked(tmp_path) == 1


def test_a_token_that_expires_soon_is_replaced(tmp_path: Path):
    found = plugin(tmp_path, says({"token": "one", "expirationTimestamp": in_minutes(0.5)}))
    assert [found.token(), found.token()] == ["one", "one"]
    assert asked(tmp_path) == 2


def test_a_certificate_instead_of_a_token(tmp_path: Path):
    status = {"clientCertificateData": "the certificate", "clientKeyData": "the key"}
    found = plugin(tmp_path, says(status))
    assert (found.token(), found.certificate()) == (None, ("the certificate", "the key"))


def test_arguments_and_environment_reach_it(tmp_path: Path):
    found = plugin(
        tmp_path,
        """printf '{"status": {"token": "%s %s"}}' "$1" "$WHO\"""",
        args=["login"],
        env=[{"name": "WHO", "value": "me"}],
    )
    assert found.token() == "login me"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("exit 3", "failed with exit status 3; sign in again", id="it-fails"),
        pytest.param("echo hello", "printed no ExecCredential", id="it-says-something-else"),
        pytest.param(says({}), "neither a token nor a certificate", id="it-gives-nothing"),
        pytest.param(
            says({"token": "one", "expirationTimestamp": "soon"}),
            "gave the expirationTimestamp 'soon', expected a time such as",
            id="it-gives-no-time",
        ),
        pytest.param(
            says({"token": "one", "expirationTimestamp": "2030-01-01T00:00:00"}),
            "gave the expirationTimestamp '2030-01-01T00:00:00', expected",
            id="it-gives-a-time-without-a-zone",
        ),
        pytest.param(
            says({"token": "one", "expirationTimestamp": 1893456000}),
            "gave the expirationTimestamp 1893456000, expected",
            id="it-gives-a-number",
        ),
    ],
)
def test_a_program_that_gives_no_credentials_is_named(tmp_path: Path, script: str, said: str):
    with pytest.raises(CredentialsError, match=f"'./sign-in' .*{said}"):
        plugin(tmp_path, script).token()


def test_a_program_that_is_not_there_says_how_to_install_it(tmp_path: Path):
    absent = ExecPlugin({"command": "absent-sign-in", "installHint": "get it\nfrom the cloud"}, tmp_path)
    with pytest.raises(CredentialsError, match="'absent-sign-in' is not there; get it from the cloud"):
        absent.token()
