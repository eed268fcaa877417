"""What the page on security tells people to apply does what it says."""

import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.parameter_server.certificates import Certificates
from fleet.role_maker.variables import Variables, key_of
from fleet_operator.api import Role, parse_job
from fleet_operator.build import ClusterHosts, build_pod
from fleet_operator.plan.model import Attempt
from tests.support import jobs
from tests.support.certificates import make_authority
from tests.support.documents import block

PAGE = Path("docs/security.md").read_text()
USAGES = {"server auth": "serverAuth", "client auth": "clientAuth"}


@pytest.fixture
def blocks() -> list[dict[str, Any]]:
    section = PAGE.partition("\n## Encryption between replicas\n")[2].partition("\n## ")[0]
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]


def test_the_certificate_is_made_for_the_servers_of_the_job(blocks: list[dict[str, Any]], tmp_path: Path):
    certificate, shown = blocks
    assert certificate["apiVersion"] == "cert-manager.io/v1"
    assert certificate["kind"] == "Certificate"
    assert {"secretName", "dnsNames", "usages", "privateKey", "issuerRef"} == set(certificate["spec"])
    job = parse_job(jobs.manifest(**shown["spec"]))
    assert (job.name, job.metadata.namespace) == tuple(certificate["metadata"].values())
    pod = build_pod(job, Role.TRAINER, 0, Attempt(), ClusterHosts(job))
    assert pod["spec"]["volumes"][0]["secret"]["secretName"] == certificate["spec"]["secretName"]

    names = [f"DNS:{name}" for name in certificate["spec"]["dnsNames"]]
    usages = ",".join(USAGES[usage] for usage in certificate["spec"]["usages"])
    folder = make_authority(tmp_path / "authority").issue(tmp_path / "tls", names, usages=usages)
    host = ClusterHosts(job)(Role.PSERVER, 1)
    meet(Certificates(folder), host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        meet(Certificates(folder), host.replace("digits.default", "other.default"))


def meet(certificates: Certificates, host: str) -> None:
    """Let a trainer that calls a host, and the server there, agree in memory."""
    loaded, there, back = certificates.current(), ssl.MemoryBIO(), ssl.MemoryBIO()
    client = loaded.client.wrap_bio(back, there, server_hostname=host)
    server = loaded.server.wrap_bio(there, back, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def test_the_key_of_the_page_is_one(tmp_path: Path):
    [command] = [
        line for line in block("docs/security.md", "The key of a job", "sh").splitlines() if "export" in line
    ]
    shown = subprocess.run(
        ["bash", "-euc", f"{command}\nenv"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    environ = dict(line.split("=", 1) for line in shown.splitlines() if line.startswith("FLEET_JOB_KEY="))
    assert len(key_of(Variables(environ))) == 32
