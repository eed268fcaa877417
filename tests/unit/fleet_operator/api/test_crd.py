"""The CustomResourceDefinition: as committed, structural, and with the models' own defaults."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_operator.api import FleetJob, parse_job
from fleet_operator.api.crd import build_crd, render_crd
from fleet_operator.api.rules import CHANGES, IMMUTABLE, RULES
from tests.support import jobs

COMMITTED = Path(__file__).parents[4] / "crds" / "fleetjobs.fleetjob.dev.yaml"


@pytest.fixture(scope="module")
def schema():
    return build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Walk all schemas below one, itself included, with their paths."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], f"{path}[]")


def with_defaults(node: dict[str, Any], value: Any) -> Any:
    """Fill defaults in, as the API server does before it validates."""
    if isinstance(value, dict):
        properties = node.get("properties", {})
        value = {
            **{name: child["default"] for name, child in properties.items() if "default" in child},
            **value,
        }
        return {name: with_defaults(properties.get(name, {}), item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(node.get("items", {}), item) for item in value]
    return value


def test_the_committed_definition_is_the_generated_one():
    assert COMMITTED.read_text() == render_crd(), (
        "crds/ has drifted: python -m fleet_operator.api.crd > crds/fleetjobs.fleetjob.dev.yaml"
    )


def test_what_is_rendered_is_what_was_built():
    assert yaml.safe_load(render_crd()) == build_crd()


@pytest.mark.parametrize("part", ["spec", "status"])
def test_kubectl_explain_describes_every_field(schema, part):
    nameless = [
        f"{path}.{name}"
        for path, node in nodes(schema["properties"][part], f".{part}")
        for name, child in node.get("properties", {}).items()
        if not child.get("description", "").endswith(".")
    ]
    assert nameless == []


def test_small_enough_for_client_side_apply():
    assert len(COMMITTED.read_bytes()) < 262_144


def test_is_structural(schema):
    for path, node in nodes(schema):
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields"), path
        assert not {"$ref", "anyOf", "allOf", "const", "title", "$defs"} & node.keys(), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_unknown_fields_of_the_spec_are_kept_in_templates_only(schema):
    open_paths = [path for path, node in nodes(schema) if node.get("x-kubernetes-preserve-unknown-fields")]
    assert open_paths
    others = (".spec.scheduling.tolerations[]", ".spec.checkpoint.volumeClaimTemplate.spec")
    assert all(".template.spec" in path or path in others for path in open_paths if path.startswith(".spec"))


def test_what_another_version_says_in_a_status_is_kept(schema):
    for path, node in nodes(schema["properties"]["status"]):
        if "properties" in node:
            assert node["x-kubernetes-preserve-unknown-fields"], path
    status = schema["properties"]["status"]["properties"]
    assert "enum" not in status["state"]
    assert "enum" not in status["conditions"]["items"]["properties"]["type"]
    assert "enum" not in status["roles"]["items"]["properties"]["role"]


@pytest.mark.parametrize("document", jobs.VALID.values(), ids=jobs.VALID.keys())
def test_defaults_of_the_schema_are_those_of_the_models(schema, document):
    filled = with_defaults(schema, parse_job(document).to_manifest())
    assert parse_job(filled) == parse_job(document)
    assert parse_job(filled).model_dump() == parse_job(document).model_dump()


def test_everything_left_out_is_written_out_by_the_schema(schema):
    filled = with_defaults(schema, jobs.manifest(pserver={}, trainer={}))["spec"]
    del filled["template"]
    assert filled == {
        "mode": "ParameterServer",
        "suspend": False,
        "pserver": {"replicas": 1, "port": 6174},
        "trainer": {"replicas": 1, "port": 6175},
        "syncMode": "Sync",
        "failurePolicy": {"rules": []},
        "successPolicy": {"type": "All"},
        "startupPolicy": {"order": "InOrder"},
        "runPolicy": {"backoffLimit": 6, "cleanPodPolicy": "Running"},
    }


def test_every_rule_is_in_it_and_points_at_a_field(schema):
    spec = schema["properties"]["spec"]
    validations = [each for rule in (*RULES, *IMMUTABLE, *CHANGES) for each in rule.validations()]
    there = [
        (path.removeprefix("."), rule["rule"])
        for path, node in nodes(spec)
        for rule in node.get("x-kubernetes-validations", ())
        if not rule["rule"].startswith("self.all(key,")  # what the keys of a map must be is said by its field
    ]
    assert sorted(there) == sorted((each.node, each.cel) for each in validations)
    assert len(validations) > len(RULES) + len(IMMUTABLE)
    for path, node in nodes(spec):
        below = {beneath for beneath, _ in nodes(node)} - {""}
        told = {rule.get("fieldPath") for rule in node.get("x-kubernetes-validations", ())} - {None}
        assert told <= below, path


def test_every_rule_stands_at_the_deepest_field_that_has_all_it_looks_at():
    for rule in (*RULES, *CHANGES):
        for each in rule.validations():
            looked_at = set(re.findall(r"\b(?:self|oldSelf)\b(?:\.(\w+))?", each.cel))
            (only,) = looked_at if len(looked_at) == 1 else ("",)
            assert f".{only}." not in each.cel or not only, f"{each.cel} belongs below {only}"


def test_whatever_cel_goes_through_has_a_bound(schema):
    for path, node in nodes(schema):
        if any("self.all(" in rule["rule"] for rule in node.get("x-kubernetes-validations", ())):
            assert {"maxItems", "maxProperties"} & node.keys(), path


def test_what_the_operator_remembers_is_one_field_that_the_schema_does_not_open(schema):
    ledger = dict(schema["properties"]["status"]["properties"]["ledger"])
    assert ledger.pop("description")
    assert ledger == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_only_the_operator_writes_a_status_and_nobody_notes_which_of_its_fields(schema):
    assert schema["properties"]["status"]["x-kubernetes-map-type"] == "atomic"


def test_all_but_the_run_policy_suspend_and_the_placement_is_immutable(schema):
    spec = schema["properties"]["spec"]
    whole = {each.field for each in IMMUTABLE if "." not in each.field}
    parts = {"trainer": {"replicas"}, "pserver": set()}
    changeable = {each.field for each in CHANGES}
    assert changeable == {
        "trainer.replicas",
        "scheduling",
        "template",
        *(f"{part}.template" for part in parts),
    }
    assert whole == set(spec["properties"]) - {"runPolicy", "suspend", "scheduling", *parts}
    for part, free in parts.items():
        fixed = {
            each.field.removeprefix(f"{part}.") for each in IMMUTABLE if each.field.startswith(f"{part}.")
        }
        assert {each for each in fixed if "." not in each} == set(
            spec["properties"][part]["properties"]
        ) - free
    for part, prefix in ((spec, ""), *((spec["properties"][each], f"{each}.") for each in parts)):
        there = {*part.get("required", ())} | {
            name for name, node in part["properties"].items() if "default" in node
        }
        for each in IMMUTABLE:
            if each.field.startswith(prefix) and "." not in (name := each.field.removeprefix(prefix)):
                assert each.optional is (name not in there), each.field


def test_the_number_of_trainers_is_what_scales(schema):
    scale = build_crd()["spec"]["versions"][0]["subresources"]["scale"]
    for path in scale.values():
        node = schema
        for name in path.removeprefix(".").split("."):
            node = node["properties"][name]
    assert scale["specReplicasPath"] == ".spec.trainer.replicas"
    assert schema["properties"]["status"]["properties"]["selector"]["type"] == "string"


def test_what_kubectl_shows():
    spec = build_crd()["spec"]
    version = spec["versions"][0]
    assert spec["names"]["shortNames"] == ["fj"]
    assert spec["names"]["categories"] == ["all"]
    assert version["subresources"]["status"] == {}
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Mode", "State", "Pservers", "Trainers", "Progress", "Restarts", "Age"]


def test_every_field_of_the_spec_is_explained(schema):
    unexplained = [
        path
        for path, node in nodes(schema["properties"]["spec"], "spec")
        if ".template" not in path and "[]" not in path and "description" not in node
    ]
    assert unexplained == []


def test_conditions_are_a_map_by_type(schema):
    conditions = schema["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_api_version_is_the_models():
    crd = build_crd()["spec"]
    assert f"{crd['group']}/{crd['versions'][0]['name']}" == FleetJob.model_fields["api_version"].default
