"""The API server refuses what `fleetjob validate` refuses, and names the same field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleet_operator.cluster.client import ApiError
from tests.support.jobs import INVALID, VALID

if TYPE_CHECKING:
    from tests.support.jobs import InvalidCase
    from tests.support.kube import Manifest, Namespace


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in INVALID])
async def test_invalid_job_is_refused(namespace: Namespace, case: InvalidCase):
    with pytest.raises(ApiError) as refused:
        await namespace.create_job(case.manifest)
    assert refused.value.status in (400, 422)
    assert case.path in str(refused.value)


@pytest.mark.parametrize("manifest", [pytest.param(value, id=name) for name, value in VALID.items()])
async def test_valid_job_is_accepted(namespace: Namespace, manifest: Manifest):
    await namespace.create_job(manifest)
