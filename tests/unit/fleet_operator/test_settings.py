from __future__ import annotations

from datetime import timedelta

import pytest

from fleet_operator.cluster.resources import FEATURES as RESOURCES
from fleet_operator.settings import FEATURES, Settings, SettingsError


def test_every_feature_is_a_kind_of_object_that_the_cluster_knows_to_make():
    assert tuple(RESOURCES) == FEATURES


def test_an_empty_environment_gives_the_defaults():
    assert Settings.from_environment({}) == Settings()
    assert (
        Settings.from_environment({"FLEET_OPERATOR_WORKERS": "", "FLEET_OPERATOR_LOG_LEVEL": ""})
        == Settings()
    )


def test_every_setting_is_read():
    environ = {
        "FLEET_OPERATOR_NAMESPACES": "team-a, team-b,,team-a",
        "FLEET_OPERATOR_FEATURES": "volcano, checkpointClaims",
        "FLEET_OPERATOR_METRICS_READERS": '[{"podSelector": {}}]',
        "FLEET_OPERATOR_WORKERS": "4",
        "FLEET_OPERATOR_RESYNC_SECONDS": "60",
        "FLEET_OPERATOR_WRITES_PER_SECOND": "50",
        "FLEET_OPERATOR_LEASE": "blue",
        "FLEET_OPERATOR_LEASE_SECONDS": "30",
        "FLEET_OPERATOR_IDENTITY": "blue-0",
        "FLEET_OPERATOR_HTTP_HOST": "127.0.0.1",
        "FLEET_OPERATOR_HTTP_PORT": "9090",
        "FLEET_OPERATOR_LOG_LEVEL": "DEBUG",
        "FLEET_OPERATOR_LOG_FORMAT": "json",
    }
    assert Settings.from_environment(environ) == Settings(
        namespaces=("team-a", "team-b"),
        features=("volcano", "checkpointClaims"),
        metrics_readers=({"podSelector": {}},),
        workers=4,
        resync=timedelta(seconds=60),
        writes_per_second=50,
        lease="blue",
        lease_duration=timedelta(seconds=30),
        identity="blue-0",
        http_host="127.0.0.1",
        http_port=9090,
        log_level="debug",
        log_format="json",
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FLEET_OPERATOR_WORKERS", "0", "found '0', expected a whole number from 1 to 256"),
        ("FLEET_OPERATOR_WORKERS", "many", "found 'many'"),
        ("FLEET_OPERATOR_WORKERS", "-4", "found '-4'"),
        ("FLEET_OPERATOR_WORKERS", "²", "found '²'"),
        ("FLEET_OPERATOR_FEATURES", "volcano,mesh", "found 'mesh', expected some of checkpointClaims"),
        ("FLEET_OPERATOR_METRICS_READERS", "prometheus", "expected a JSON list of objects"),
        ("FLEET_OPERATOR_METRICS_READERS", '{"podSelector": {}}', "expected a JSON list of objects"),
        ("FLEET_OPERATOR_METRICS_READERS", "[{}]", "some of ipBlock, namespaceSelector, podSelector"),
        ("FLEET_OPERATOR_METRICS_READERS", '[{"pods": {}}]', "some of ipBlock"),
        ("FLEET_OPERATOR_HTTP_PORT", "70000", "from 0 to 65535"),
        ("FLEET_OPERATOR_RESYNC_SECONDS", "1.5", "found '1.5'"),
        ("FLEET_OPERATOR_LEASE_SECONDS", "1", "found '1', expected a whole number from 2 to 3600"),
        ("FLEET_OPERATOR_WRITES_PER_SECOND", "0", "found '0'"),
        ("FLEET_OPERATOR_LOG_LEVEL", "loud", "expected one of debug, info, warning, error"),
        ("FLEET_OPERATOR_LOG_FORMAT", "xml", "expected one of text, json"),
    ],
)
def test_a_value_of_no_use_is_refused_by_name(name: str, value: str, expected: str):
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment({name: value})
    assert str(refused.value).startswith(f"{name}: found")
    assert expected in str(refused.value)
