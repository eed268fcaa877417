"""The administrator of a test's control plane, with full access to the API server."""

from __future__ import annotations

import base64
import functools
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import yaml

from tools import assets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Administrator:
    """Full access to an API server, by HTTP requests or kubectl.

    Parameters
    ----------
    server : str
        The API server's address.
    token : str
        The administrator's token.
    certificate : Path
        The API server's certificate; it may be written later.
    kubeconfig : Path
        A kubeconfig with these values; it may be written later.
    """

    def __init__(self, server: str, token: str, certificate: Path, kubeconfig: Path) -> None:
        self.server = server
        self.certificate = certificate
        self.kubeconfig = kubeconfig
        self._token = token

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl with full access; return its stdout, followed by its stderr if `check` is false."""
        ended = subprocess.run(
            [_kubectl(), "--kubeconfig", self.kubeconfig, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if check and ended.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {ended.stderr}")
        return ended.stdout + ("" if check else ended.stderr)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Send an HTTP request with full access.

        Raises
        ------
        urllib.error.HTTPError
            The response is an error; its body contains the server's message.
        """
        request = urllib.request.Request(  # noqa: S310 the address is our own
            self.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": content_type},
        )
        # No proxies: looking them up would read the environment, which pytest changes for each test.
        tls = ssl.create_default_context(cafile=str(self.certificate))
        direct = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        with urllib.request.build_opener(*direct).open(request, timeout=30) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def is_answered(self, path: str) -> bool:
        """Return whether a request for this path succeeds."""
        try:
            self.request("GET", path)
        except json.JSONDecodeError:
            return True  # /readyz says "ok", not JSON
        except (OSError, urllib.error.URLError):
            return False
        return True

    def write_kubeconfig(self, path: Path, token: str, namespace: str = "default") -> Path:
        """Write a kubeconfig that authenticates with `token`."""
        ca = base64.b64encode(self.certificate.read_bytes()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "clusters": [
                {"name": "test", "cluster": {"server": self.server, "certificate-authority-data": ca}}
            ],
        }
        path.write_text(yaml.safe_dump(config))
        return path


@functools.cache
def _kubectl() -> Path:
    return assets.find(["kubectl"])["kubectl"]
