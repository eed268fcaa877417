"""What the page on checkpoints tells people to put into a manifest does what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts, build_pod
from fleet_operator.build.volumes import build_claims
from fleet_operator.plan.model import Attempt
from tests.support import jobs
from tests.support.manifests import template

PAGE = Path("docs/checkpoints.md").read_text()
SPECS = [yaml.safe_load(block)["spec"] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.mark.parametrize(
    ("spec", "claimed"),
    list(
        zip(
            SPECS,
            [[], ["digits-checkpoint-11111111-pserver-0", "digits-checkpoint-11111111-pserver-1"], []],
            strict=True,
        )
    ),
    ids=["there", "made", "of-an-earlier-job"],
)
def test_servers_find_the_folder_that_the_page_names(spec: dict[str, Any], claimed: list[str]):
    pods = template(**spec.get("template", {}).get("spec", {}))
    job = jobs.job(jobs.manifest(**{**spec, "template": pods}))
    assert [each["metadata"]["name"] for each in build_claims(job)] == claimed
    [container] = build_pod(job, Role.PSERVER, 0, Attempt(), ClusterHosts(job))["spec"]["containers"]
    folder = next(each["value"] for each in container["env"] if each["name"] == "FLEET_CHECKPOINT_DIR")
    assert folder in [each["mountPath"] for each in container["volumeMounts"]]
    named = set(re.findall(r'_check_points?\("([^"]+)"', PAGE))
    assert named == {folder}


def test_a_fresh_volume_is_given_to_the_user_of_the_image():
    user = re.findall(r"^USER (\d+):\d+$", Path("Dockerfile").read_text(), re.MULTILINE)[-1]
    assert SPECS[0]["template"]["spec"]["securityContext"] == {"fsGroup": int(user)}
