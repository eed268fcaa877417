"""Typing errors in templates, found without a cluster."""

import pytest

from fleet_operator.manifests import pod_fields
from tests.support.jobs import VALID
from tests.support.manifests import at, manifest

POD = "spec.template.spec"
MAIN = "spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        pytest.param(
            at(f"{MAIN}.resorces", {"limits": {"cpu": 1}}),
            f"{POD}.containers[0].resorces",
            "did you mean resources?",
            id="resources-misspelt",
        ),
        pytest.param(
            at(f"{MAIN}.imagePullPolcy", "Always"),
            f"{POD}.containers[0].imagePullPolcy",
            "did you mean imagePullPolicy?",
            id="a-policy-misspelt",
        ),
        pytest.param(
            at(f"{MAIN}.evn", []), f"{POD}.containers[0].evn", "did you mean env?", id="letters-swapped"
        ),
        pytest.param(
            at(f"{MAIN}.comand", []),
            f"{POD}.containers[0].comand",
            "did you mean command?",
            id="a-letter-left-out",
        ),
        pytest.param(
            at(f"{MAIN}.env", [{"name": "A", "valueFrom": {"fieldref": {}}}]),
            f"{POD}.containers[0].env[0].valueFrom.fieldref",
            "did you mean fieldRef?",
            id="another-case-far-below",
        ),
        pytest.param(
            at(f"{MAIN}.limits", {}),
            f"{POD}.containers[0].limits",
            "it below resources (did you mean resources.limits?)",
            id="too-far-out",
        ),
        pytest.param(
            at(f"{POD}.command", []),
            f"{POD}.command",
            "it below containers (did you mean containers[0].command?)",
            id="beside-the-containers",
        ),
        pytest.param(
            at(f"{MAIN}.nodeSelector", {}),
            f"{POD}.containers[0].nodeSelector",
            f"it below {POD} (did you mean to indent it less?)",
            id="too-far-in",
        ),
        pytest.param(
            at(f"{MAIN}.resources", {"claims": [{"title": "x"}]}),
            f"{POD}.containers[0].resources.claims[0].title",
            "one of name, request",
            id="like-no-other",
        ),
        pytest.param(
            manifest(scheduling={"tolerations": [{"opertor": "Exists"}]}),
            "spec.scheduling.tolerations[0].opertor",
            "did you mean operator?",
            id="in-a-toleration",
        ),
        pytest.param(
            manifest(checkpoint={"volumeClaimTemplate": {"spec": {"accessMode": ["ReadWriteOnce"]}}}),
            "spec.checkpoint.volumeClaimTemplate.spec.accessMode",
            "did you mean accessModes?",
            id="in-a-claim",
        ),
        pytest.param(
            at("spec.trainer.template", {"spec": {"container": []}}),
            "spec.trainer.template.spec.container",
            "did you mean containers?",
            id="in-a-role's-template",
        ),
    ],
)
def test_an_unknown_field(document, path, expected):
    found = pod_fields.find(document)
    [problem] = found.unknown
    assert (problem.path, problem.found, found.misfit) == (path, "an unknown field", ())
    assert expected in problem.expected


@pytest.mark.parametrize(
    ("document", "path", "told"),
    [
        pytest.param(
            at(f"{MAIN}.env", [{"name": "A", "value": 5}]),
            f"{POD}.containers[0].env[0].value",
            "found 5, expected text (in quotes",
            id="a-number-for-text",
        ),
        pytest.param(
            at(f"{MAIN}.env", {"A": "5"}),
            f"{POD}.containers[0].env",
            "found a map of 1, expected a list",
            id="a-map",
        ),
        pytest.param(
            at(f"{MAIN}.securityContext", []),
            f"{POD}.containers[0].securityContext",
            "found a list of 0, expected a map",
            id="a-list",
        ),
        *(
            pytest.param(
                at(f"{MAIN}.resources", {which: {name: 1}}),
                f"{POD}.containers[0].resources.{which}",
                f"found {name!r}, expected names of resources: cpu, memory, ephemeral-storage",
                id=f"no-name-of-a-resource-{name}",
            )
            for which, name in (("limits", "gpu"), ("requests", "nvidia.com/"), ("limits", "hugepages"))
        ),
        pytest.param(
            at(f"{POD}.hostPID", "yes"),
            f"{POD}.hostPID",
            "found 'yes', expected true or false",
            id="text-for-truth",
        ),
        pytest.param(
            at(f"{POD}.priority", True),
            f"{POD}.priority",
            "found true, expected a whole number",
            id="truth-for-a-number",
        ),
        pytest.param(
            at(f"{POD}.nodeSelector", {"zone": 3}),
            f"{POD}.nodeSelector[zone]",
            "found 3, expected text",
            id="in-a-map-with-keys-of-ones-own",
        ),
    ],
)
def test_a_value_of_another_kind(document, path, told):
    [problem] = pod_fields.find(document).misfit
    assert problem.path == path
    assert told in str(problem)


def test_what_a_cluster_accepts_is_accepted():
    whole = at(f"{POD}.terminationGracePeriodSeconds", 30.0)
    for name, document in (VALID | {"a-whole-number": whole}).items():
        found = pod_fields.find(document)
        assert (found.unknown, found.misfit) == ((), ()), name


@pytest.mark.parametrize(
    "document", [{}, {"spec": None}, {"spec": {"template": []}}, {"spec": {"scheduling": 3}}]
)
def test_what_is_no_job_is_left_to_others(document):
    assert pod_fields.find(document)[1:] == ((), ())
