"""Settings that a collective job refuses before its trainers connect."""

import pytest

from fleet.errors import ConfigurationError
from fleet.facade.collective import Fleet
from fleet.process import lifecycle
from fleet.role_maker import UserDefinedCollectiveRoleMaker


def test_certificates_are_refused_because_gloo_does_not_encrypt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    monkeypatch.setenv("FLEET_TLS_DIR", "/etc/fleet/tls")
    with pytest.raises(
        ConfigurationError, match="FLEET_TLS_DIR is '/etc/fleet/tls', but gloo, NCCL and torch"
    ):
        Fleet().init(UserDefinedCollectiveRoleMaker(0, ["127.0.0.1:6175"]))
