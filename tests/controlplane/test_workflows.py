"""The examples for workflow engines, with the operator at work: what the engines do is done here."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import yaml

from fleet_operator.api import ConditionType
from fleet_operator.client import JobFailedError
from tests.support.digits_job import TRAINERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Namespace

ARGO = Path("examples/argo/workflow.yaml")
MANIFEST = Path("examples/digits/fleetjob.yaml").read_text()
KUBEFLOW = Path("examples/kubeflow-pipelines")
COMPONENT = (KUBEFLOW / "component.py").read_text()
KFP = Path(".venv-kfp/bin/python").absolute()


def argo_step() -> dict[str, Any]:
    """Return the step of the workflow that trains."""
    [step] = [
        each for each in yaml.safe_load(ARGO.read_text())["spec"]["templates"] if each["name"] == "train"
    ]
    return dict(step)


def test_argos_job_is_that_of_digits_but_for_its_name():
    job, digits = yaml.safe_load(argo_step()["resource"]["manifest"]), yaml.safe_load(MANIFEST)
    assert job.pop("metadata") == {"generateName": "digits-"}
    digits.pop("metadata")
    assert job == digits


@pytest.mark.parametrize("fails", [False, True])
async def test_argo_creates_the_job_and_sees_its_end(
    namespace: Namespace, control_plane: ControlPlane, tmp_path: Path, *, fails: bool
):
    """Argo runs `kubectl create`, and then compares fields with the conditions, as labels with a selector."""
    step = argo_step()
    resource, kubectl = step["resource"], control_plane.admin.kubectl
    document = yaml.safe_load(resource["manifest"])
    if fails:
        document["spec"]["failurePolicy"] = {"action": "FailJob"}
        annotations = {"fleet.test/exit-code": "3"}
        document["spec"]["template"]["metadata"] = {"annotations": annotations}
    created = kubectl(
        resource["action"], "-n", namespace.name, "-f", "-", "-o", "name", stdin=yaml.safe_dump(document)
    )
    name = created.strip().partition("/")[2]
    assert re.fullmatch("digits-.{5}", name)

    def selects(condition: str, job: dict[str, Any]) -> bool:
        """Ask the API server, whose parser of selectors is the one that Argo uses."""
        labels: dict[str, str] = {}
        for path in (resource["successCondition"].split()[0], resource["failureCondition"].split()[0]):
            value: Any = job
            for part in path.split("."):
                value = value.get(part, {})
            if value != {}:
                labels[path] = str(value)
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fields", "labels": labels}}
        kubectl("apply", "-n", namespace.name, "-f", "-", stdin=yaml.safe_dump(config))
        return "fields" in kubectl("get", "configmaps", "-n", namespace.name, "-l", condition, "-o", "name")

    if not fails:
        running = await namespace.until_state(name, "Running")
        for each in ("successCondition", "failureCondition"):
            assert not await asyncio.to_thread(selects, resource[each], running)
        await namespace.end(*(each.replace("digits", name) for each in TRAINERS))
    ended = await namespace.until_state(name, "Failed" if fails else "Succeeded")
    assert ended["status"]["terminalState"] == (ConditionType.FAILED if fails else ConditionType.COMPLETE)
    assert selects(resource["failureCondition"], ended) is fails
    assert selects(resource["successCondition"], ended) is not fails
    outputs = [each["valueFrom"]["jsonPath"] for each in step["outputs"]["parameters"]]
    job = ("get", f"fj/{name}", "-n", namespace.name)
    found = [kubectl(*job, "-o", f"jsonpath={path}") for path in outputs]
    assert found == ["Failed" if fails else "Succeeded", "0"]


def component(source: str) -> Callable[..., Any]:
    """Return the function that a source of the component defines, as a plain function."""
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102 as Kubeflow's executor runs it
    function: Callable[..., Any] = names["train_fleetjob"]
    return function


async def test_kubeflows_component_trains_and_shows_the_logs(
    namespace: Namespace, control_plane: ControlPlane, capfd: pytest.CaptureFixture[str]
):
    control_plane.pods_log.write_text("2026-01-02T03:04:05.6Z stdout F loss 0.5\n")
    call = {"manifest": MANIFEST, "name": "run-7", "namespace": namespace.name}
    with mock.patch.dict(os.environ, {"KUBECONFIG": str(control_plane.admin.kubeconfig)}):
        training = asyncio.create_task(asyncio.to_thread(component(COMPONENT), **call))
        await namespace.until_state("run-7", "Running")
        await namespace.end(*(each.replace("digits", "run-7") for each in TRAINERS))
        outputs = await training
    assert outputs.restarts == 0
    assert outputs.completion_time.startswith("20")
    assert "[trainer-1] loss 0.5" in capfd.readouterr().out
    assert await namespace.all("fleetjobs") == []


@pytest.mark.skipif(not KFP.exists(), reason="`make .venv-kfp/.installed` brings kfp")
async def test_kubeflows_compiled_step_fails_with_the_reason_of_the_job(
    namespace: Namespace, control_plane: ControlPlane, tmp_path: Path
):
    compiled = tmp_path / "pipeline.yaml"
    await asyncio.to_thread(
        subprocess.run,
        [KFP, KUBEFLOW / "pipeline.py", compiled],
        check=True,
        timeout=100,
        env={"PATH": os.environ["PATH"]},
    )
    specification = yaml.safe_load(compiled.read_text())
    executor = specification["deploymentSpec"]["executors"]["exec-train-fleetjob"]["container"]
    inputs = specification["root"]["dag"]["tasks"]["train-fleetjob"]["inputs"]["parameters"]
    document = yaml.safe_load(inputs["manifest"]["runtimeValue"]["constant"])
    document["spec"]["failurePolicy"] = {"action": "FailJob"}
    document["spec"]["template"]["metadata"] = {"annotations": {"fleet.test/exit-code": "3"}}
    # Kubeflow's executor runs this source in the step's image, where kfp is too.
    source = executor["command"][-1].replace("import kfp\nfrom kfp import dsl\nfrom kfp.dsl import *\n", "")
    call = {"manifest": yaml.safe_dump(document), "name": "run-8", "namespace": namespace.name}
    with (
        mock.patch.dict(os.environ, {"KUBECONFIG": str(control_plane.admin.kubeconfig)}),
        pytest.raises(JobFailedError, match="exit code 3"),
    ):
        await asyncio.to_thread(component(source), **call)
    assert sys.modules.get("kfp") is None
