"""The certificate of the systems that encrypt."""

from benchmarks import certificates
from fleet.parameter_server.certificates import certificates_of
from fleet.parameter_server.settings import Settings


def test_replicas_take_it_for_their_own():
    settings = Settings.from_environ(certificates.environment())
    found = certificates_of(settings)
    assert found is not None
    assert found.server_name == settings.tls_server_name == "benchmark"
