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
        pytest.param({"nodePool": {"gpusPerTrainer": 1}}, "spec.nodePool", id="added"),
        pytest.param({"template": None}, "spec.template", id="removed"),
        pytest.param(
            {"template": {"spec": {"containers": [{"name": "fleet", "image": "other"}]}}},
            "spec.template",
            id="another-image",
        ),
        pytest.param({"trainer": {"template": with_limit(1.5)}}, "spec.trainer.template", id="another-limit"),
    ],
)
async def test_what_pods_are_made_of_cannot_change(namespace: Namespace, change: Manifest, field: str):
    role = {"replicas": 2, "template": with_limit(0.5)}
    await namespace.create_job(manifest(pserver=role, trainer=role, runPolicy={"suspend": True}))
    path = namespace.path("fleetjobs", "digits")
    with pytest.raises(ApiException, match=f"no change of {field}: delete the job and create it again"):
        await namespace.client.merge_patch(path, {"spec": change})
    changed = await namespace.client.merge_patch(path, {"spec": {"runPolicy": {"backoffLimit": 1}}})
    assert changed["spec"]["runPolicy"]["backoffLimit"] == 1


@pytest.mark.parametrize("valid", [pytest.param(value, id=name) for name, value in VALID.items()])
async def test_valid_job_is_accepted(namespace: Namespace, valid: Manifest):
    # An operator that is there would begin it, with a service account that is not.
    accepted = await namespace.create_job(valid, dry_run=True)
    assert accepted["metadata"]["uid"]
