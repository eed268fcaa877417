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
        "FLEET_START_DEADLINE_SECONDS": "600",
        "FLEET_SOCKET_BUFFER_BYTES": "65536",
        "FLAGS_rpc_retry_times": "7",
        "FLAGS_rpc_send_thread_num": "1",
        "FLAGS_rpc_prefetch_thread_num": "3",
        "FLAGS_communicator_send_queue_size": "9",
        "FLAGS_communicator_max_merge_var_num": "5",
        "FLEET_MAX_TRAINERS": "4",
        "FLEET_TLS_DIR": "/etc/fleet/tls",
        "FLEET_TLS_SERVER_NAME": "digits",
        "OTHER": "x",
    }
    assert Settings.from_environ(environ) == Settings(
        0.5,
        2.5,
        600,
        65536,
        send_queue_size=9,
        max_merge_var_num=5,
        look_ups_at_once=3,
        retry_times=7,
        max_trainers=4,
        tls_dir="/etc/fleet/tls",
        tls_server_name="digits",
    )


def test_peers_that_have_never_been_there_have_a_deadline_of_their_own():
    settings = Settings(deadline_seconds=180)
    assert (settings.starting_seconds, settings.stalled_seconds) == (180, 1800)
    settings = Settings(deadline_seconds=180, start_deadline_seconds=3600)
    assert (settings.starting_seconds, settings.stalled_seconds) == (3600, 3600)
    settings = Settings(deadline_seconds=180, start_deadline_seconds=30)
    assert settings.starting_seconds == 180, "a pod that runs has still to import and to load"


def test_trying_again_may_be_switched_off():
    assert Settings.from_environ({"FLAGS_rpc_retry_times": "0"}).retry_times == 0


@pytest.mark.parametrize(
    "name",
    [
        "FLAGS_rpc_retry_times",
        "FLAGS_rpc_send_thread_num",
        "FLAGS_rpc_get_thread_num",
        "FLAGS_rpc_prefetch_thread_num",
        "FLAGS_communicator_send_queue_size",
        "FLAGS_communicator_max_merge_var_num",
    ],
)
@pytest.mark.parametrize(
    ("value", "expected"), [("-1", "positive"), ("many", "positive"), ("1.5", "whole"), ("inf", "positive")]
)
def test_a_malformed_count_is_named(name, value, expected):
    with pytest.raises(ConfigurationError, match=f"{name} is '{value}'; expected a {expected} number"):
        Settings.from_environ({name: value})


@pytest.mark.parametrize(
    "name",
    [
        "FLEET_HEARTBEAT_SECONDS",
        "FLAGS_rpc_deadline",
        "FLEET_SOCKET_BUFFER_BYTES",
        "FLEET_START_DEADLINE_SECONDS",
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e999"])
def test_a_malformed_value_is_named(name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is '{value}'; expected a positive number"):
        Settings.from_environ({name: value})
