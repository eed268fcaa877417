"""The API server refuses what `fleetjob validate` refuses, and names the same field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import INVALID, VALID, manifest
from tests.support.kube import ApiException

if TYPE_CHECKING:
    from tests.support.jobs import InvalidCase
    from tests.support.kube import Manifest, Namespace


def with_limit(cores: float) -> Manifest:
    resources = {"limits": {"cpu": cores}}
    return {
        "spec": {
            "containers": [{"name": "fleet", "image": "example.com/trainer:1", "resources": resources}],
        }
    }


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in INVALID])
async def test_invalid_job_is_refused(namespace: Namespace, case: InvalidCase):
    with pytest.raises(ApiException) as refused:
        await namespace.create_job(case.manifest)
    assert refused.value.status in (400, 422)
    assert case.path in str(refused.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"trainer": {"port": 7000}}, "spec.trainer.port", id="changed"),
        pytest.param({"trainer": {"template": None}}, "spec.trainer.template", id="removed-from-a-role"),
        pytest.param(
            {"trainer": {"minReplicas": 1, "maxReplicas": 3}}, "spec.trainer.maxReplicas", id="bounds-added"
        ),
        pytest.param({"trainer": {"devices": {"count": 1}}}, "spec.trainer.devices", id="added"),
        pytest.param({"template": None}, "spec.template", id="removed"),
        pytest.param(
            {"template": {"spec": {"containers": [{"name": "fleet", "image": "other"}]}}},
            "spec.template.spec.containers",
            id="another-image",
        ),
        pytest.param(
            {"trainer": {"template": with_limit(1.5)}},
            "spec.trainer.template.spec.containers",
            id="another-limit",
        ),
        pytest.param({"pserver": {"replicas": 3}}, "spec.pserver.replicas", id="servers"),
        pytest.param(
            {"template": {"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}}},
            "spec.template.spec.volumes",
            id="volumes-added",
        ),
    ],
)
async def test_what_pods_are_made_of_cannot_change(namespace: Namespace, change: Manifest, field: str):
    role = {"replicas": 2, "template": with_limit(0.5)}
    await namespace.create_job(manifest(pserver=role, trainer=role, suspend=True))
    path = namespace.path("fleetjobs", "digits")
    with pytest.raises(ApiException, match=f"no change of {field}: delete the job and create it again"):
        await namespace.client.merge_patch(path, {"spec": change})
    changed = await namespace.client.merge_patch(path, {"spec": {"runPolicy": {"backoffLimit": 1}}})
    assert changed["spec"]["runPolicy"]["backoffLimit"] == 1


PLACED: Manifest = {
    "template": {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"example.com/note": "spot"}},
        "spec": {
            "nodeSelector": {"example.com/flavor": "spot"},
            "tolerations": [{"key": "example.com/spot", "operator": "Exists"}],
            "schedulingGates": [{"name": "example.com/wait"}],
        },
    },
    "scheduling": {"nodeSelector": {"example.com/zone": "a"}},
}


async def test_where_pods_run_may_change_while_the_job_is_suspended_and_not_afterwards(namespace: Namespace):
    await namespace.create_job(manifest(suspend=True))
    await namespace.until_state("digits", "Suspended")
    path = namespace.path("fleetjobs", "digits")
    await namespace.client.merge_patch(path, {"spec": {"scheduling": {"nodeSelector": {"a": "b"}}}})
    resuming = {**PLACED, "suspend": False}  # in one update, as Kueue does it
    resuming["scheduling"] = {"nodeSelector": {"example.com/zone": "a", "a": None}}
    await namespace.client.merge_patch(path, {"spec": resuming})
    pods = await namespace.until_pods("digits", "the servers", lambda pods: len(pods) == 2)
    for pod in pods.values():
        assert pod["metadata"]["labels"]["team"] == "vision"
        assert pod["metadata"]["annotations"]["example.com/note"] == "spot"
        assert pod["spec"]["nodeSelector"] == {"example.com/flavor": "spot", "example.com/zone": "a"}
        assert pod["spec"]["schedulingGates"] == [{"name": "example.com/wait"}]
        assert PLACED["template"]["spec"]["tolerations"][0] in pod["spec"]["tolerations"]
    for field, change in (
        ("template", {"template": {"spec": {"nodeSelector": {"example.com/flavor": None}}}}),
        ("scheduling", {"scheduling": None}),
    ):
        with pytest.raises(ApiException, match=f"no change of spec.{field} while the job runs"):
            await namespace.client.merge_patch(path, {"spec": change})
        await namespace.client.merge_patch(path, {"spec": {**change, "suspend": True}})
        await namespace.client.merge_patch(path, {"spec": {"suspend": False}})


@pytest.mark.parametrize("valid", [pytest.param(value, id=name) for name, value in VALID.items()])
async def test_valid_job_is_accepted(namespace: Namespace, valid: Manifest):
    # An operator that is there would begin it, with a service account that is not.
    accepted = await namespace.create_job(valid, dry_run=True)
    assert accepted["metadata"]["uid"]
