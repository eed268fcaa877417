"""Certificates for tests, issued by a test authority through the openssl command."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Authority", "make_authority"]

USAGES = "serverAuth,clientAuth"


@dataclass(frozen=True)
class Authority:
    """A certificate authority whose key and certificate are in one folder."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The path of the authority's certificate."""
        return self.folder / "authority.crt"

    def issue(
        self,
        into: Path,
        names: Sequence[str] = ("IP:127.0.0.1", "DNS:localhost"),
        *,
        usages: str = USAGES,
        days: int = 1,
        subject: str = "/CN=replica",
    ) -> Path:
        """Write a new certificate, its key and the authority's certificate to a folder, as cert-manager does.

        Parameters
        ----------
        into : Path
        names : sequence of str
            The subject's alternative names.
        usages : str
            The permitted usages.
        days : int
            The validity in days; negative for a certificate that has already expired.
        subject : str
            The subject of the certificate.
        """
        into.mkdir(parents=True, exist_ok=True)
        request, extensions = self.folder / "request.pem", self.folder / "extensions"
        extensions.write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage={usages}\n")
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", into / "tls.key", "-subj", subject, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate),
            *("-CAkey", self.folder / "authority.key", "-CAcreateserial"),
            *("-days", days, "-extfile", extensions, "-out", into / "tls.crt"),
        )
        (into / "ca.crt").write_bytes(self.certificate.read_bytes())
        return into


def make_authority(folder: Path) -> Authority:
    """Create a certificate authority in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Authority(folder)
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 1),
        *("-keyout", folder / "authority.key", "-subj", "/CN=authority", "-out", made.certificate),
    )
    return made


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)
