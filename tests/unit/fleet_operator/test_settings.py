from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from fleet_operator.kubernetes.client import FEATURES as RESOURCES
from fleet_operator.settings import FEATURES, Settings, SettingsError


def test_every_feature_is_a_kind_of_object_that_the_cluster_knows_to_make():
    assert (*RESOURCES, "kueue") == FEATURES  # of Kueue nothing is created or watched


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
        ("FLEET_OPERATOR_METRICS_READERS", '[{"podSelector": {}}, {}]', "some of ipBlock"),
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


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param({"podSelector": {}, "namespaceSelector": {"matchLabels": {"a": "b"}}}, id="selectors"),
        pytest.param(
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}},
            id="an-expression-with-values",
        ),
        pytest.param(
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}},
            id="an-expression-without-values",
        ),
        pytest.param({"ipBlock": {"cidr": "10.0.0.0/8"}}, id="a-network"),
        pytest.param({"ipBlock": {"cidr": "fd00::/8", "except": ["fd00:1::/32"]}}, id="less-a-part"),
    ],
)
def test_any_peer_of_a_network_policy_may_read_metrics(peer: dict[str, Any]):
    environ = {"FLEET_OPERATOR_METRICS_READERS": json.dumps([peer])}
    assert Settings.from_environment(environ).metrics_readers == (peer,)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        pytest.param(
            {"namespaceSelector": {"matchLabel": {"a": "b"}}},
            "a namespaceSelector of matchLabels and matchExpressions only",
            id="a-misspelt-field-that-the-api-server-drops",
        ),
        pytest.param({"podSelector": None}, "a podSelector of matchLabels", id="nothing"),
        pytest.param({"podSelector": {"matchLabels": None}}, "a podSelector of matchLabels", id="no-labels"),
        pytest.param({"podSelector": {"matchLabels": {"a": 1}}}, "a podSelector", id="a-number"),
        pytest.param(
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists", "value": ["b"]}]}},
            "a podSelector",
            id="a-misspelt-field-of-an-expression",
        ),
        pytest.param(
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "a podSelector",
            id="nothing-to-compare-with",
        ),
        pytest.param(
            {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Is", "values": ["b"]}]}},
            "a podSelector",
            id="no-operator-of-selectors",
        ),
        pytest.param(
            {"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "an ipBlock to be alone", id="two-in-one"
        ),
        pytest.param({"ipBlock": {"cidr": "10.0.0.0"}}, "a cidr such as 10.0.0.0/8", id="an-address"),
        pytest.param({"ipBlock": {"cidr": "10.0.0.1/8"}}, "a cidr such as", id="an-address-with-a-mask"),
        pytest.param({"ipBlock": {"cidr": "10.0.0.0/33"}}, "a cidr such as", id="too-long-a-prefix"),
        pytest.param({"ipBlock": {"cidrs": "10.0.0.0/8"}}, "a cidr such as", id="no-cidr"),
        pytest.param(
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}},
            "networks within it",
            id="an-exception-from-another-network",
        ),
        pytest.param(
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}},
            "networks within it",
            id="an-exception-that-leaves-nothing",
        ),
        pytest.param({"ipBlock": {"cidr": "10.0.0.0/8", "except": "10.1.0.0/16"}}, "in a list", id="no-list"),
    ],
)
def test_what_is_no_peer_of_a_network_policy_is_refused_before_any_policy_is_made(
    peer: dict[str, Any], expected: str
):
    environ = {"FLEET_OPERATOR_METRICS_READERS": json.dumps([{"podSelector": {}}, peer])}
    with pytest.raises(SettingsError) as refused:
        Settings.from_environment(environ)
    assert f"FLEET_OPERATOR_METRICS_READERS: found {json.dumps(peer)}, expected " in str(refused.value)
    assert expected in str(refused.value)
