"""Credentials from a program that a kubeconfig names, as kubectl gets them from clouds and single sign-on.

The protocol is ``client.authentication.k8s.io``: the program prints an ExecCredential with a token or a
certificate. It is asked again once its token expires; a certificate is asked for once.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PLUGIN_SECONDS = 120.0
"""How long the program may take: it may have somebody sign in."""

EARLY = timedelta(seconds=60)
"""How long before its end a token is replaced."""


class CredentialsError(OperatorError):
    """The program did not give credentials; the message says what to do."""


@dataclass(slots=True)
class ExecPlugin:
    """One user's program.

    Parameters
    ----------
    config : mapping
        The kubeconfig's ``exec`` section.
    folder : Path
        The kubeconfig's folder, which relative commands start from.
    """

    config: Mapping[str, Any] = field(repr=False)
    folder: Path
    _status: Mapping[str, Any] | None = field(default=None, init=False, repr=False)

    def token(self) -> str | None:
        """Return the token to send now, or None if the program gives certificates.

        Raises
        ------
        CredentialsError
            The program is not there, fails, or says something else.
        """
        if self._status is None or _expires_soon(self._status):
            self._status = self._ask()
        token: str | None = self._status.get("token")
        return token

    def certificate(self) -> tuple[str | None, str | None]:
        """Return the client's certificate and key, if the program gives any."""
        self.token()
        status = self._status or {}
        return status.get("clientCertificateData"), status.get("clientKeyData")

    def _ask(self) -> Mapping[str, Any]:
        command = str(self.config.get("command") or "")
        shown = f"the kubeconfig's credential program {command!r}"
        program = str(self.folder / command) if os.sep in command else command
        version = self.config.get("apiVersion", "client.authentication.k8s.io/v1")
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        own = {each["name"]: each["value"] for each in self.config.get("env") or ()}
        try:
            ended = subprocess.run(
                [program, *(self.config.get("args") or ())],
                env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # what it says to people goes to them, on standard error
                timeout=PLUGIN_SECONDS,
                check=False,
            )
        except FileNotFoundError as error:
            hint = self.config.get("installHint") or "install it, or choose another context"
            raise CredentialsError(f"{shown} is not there; {' '.join(hint.split())}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CredentialsError(f"{shown} did not run: {error}") from error
        if ended.returncode != 0:
            raise CredentialsError(
                f"{shown} failed with exit status {ended.returncode}; sign in again, or take another context"
            )
        return _status_in(ended.stdout, shown)


def _status_in(printed: bytes, shown: str) -> Mapping[str, Any]:
    try:
        status = json.loads(printed)["status"]
    except (ValueError, KeyError, TypeError) as error:
        raise CredentialsError(f"{shown} printed no ExecCredential with a status") from error
    if not isinstance(status, dict) or not (status.get("token") or status.get("clientCertificateData")):
        raise CredentialsError(f"{shown} gave neither a token nor a certificate")
    until = status.get("expirationTimestamp")
    if until is not None and not _is_moment(until):
        raise CredentialsError(
            f"{shown} gave the expirationTimestamp {until!r}, expected a time such as 2030-01-01T00:00:00Z"
        )
    return status


def _is_moment(text: Any) -> bool:
    """Whether this is a time with its zone."""
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except (ValueError, TypeError):
        return False


def _expires_soon(status: Mapping[str, Any]) -> bool:
    until = status.get("expirationTimestamp")
    return until is not None and datetime.fromisoformat(until) - EARLY <= datetime.now(UTC)
