"""What the environment may tune."""

import pytest

from fleet.errors import ConfigurationError
from fleet.parameter_server.settings import Settings


def test_the_defaults_are_the_documented_ones():
    settings = Settings.from_environ({})
    assert settings == Settings(heartbeat_seconds=2.0, deadline_seconds=180.0, socket_buffer_bytes=None)
    assert settings.silent_seconds == 10.0


def test_every_variable_is_read():
    environ = {
        "FLEET_HEARTBEAT_SECONDS": "0.5",
        "FLAGS_rpc_deadline": "2500",
        "FLEET_SOCKET_BUFFER_BYTES": "65536",
        "OTHER": "x",
    }
    assert Settings.from_environ(environ) == Settings(0.5, 2.5, 65536)


@pytest.mark.parametrize(
    "name", ["FLEET_HEARTBEAT_SECONDS", "FLAGS_rpc_deadline", "FLEET_SOCKET_BUFFER_BYTES"]
)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e999"])
def test_a_malformed_value_is_named(name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is '{value}'; expected a positive number"):
        Settings.from_environ({name: value})
