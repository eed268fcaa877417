"""Plans as plain values: what is written comes back, and what is no plan is refused with its place."""

import json
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import TranspileError
from fleet.plan import DistributeTranspilerConfig
from fleet.plan.capture import capture_loop
from fleet.plan.document import read_plan, write_plan
from fleet.plan.job import CollectivePlan, JobPlan, plan_job
from tests.support.programs import Parameters

ENDPOINTS = ["10.0.0.1:6174", "10.0.0.2:6174"]
CLIPS = [None, fleet.ClipGradByValue(2.0, -1.0), fleet.ClipGradByNorm(1.0), fleet.ClipGradByGlobalNorm(1.0)]


def planned(clip: Any = None) -> JobPlan:
    module = Parameters({"w": (400, 100), "b": (100,)})
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1), betas=(0.1, 0.2))
    spec, source = capture_loop(optimizer, module, clip)
    return plan_job(spec, source, DistributeTranspilerConfig(), ENDPOINTS, 2)


def again(document: object) -> Any:
    return read_plan("plan", json.loads(json.dumps(document)))


@pytest.mark.parametrize("clip", CLIPS)
def test_what_is_written_comes_back(clip):
    plan = planned(clip)
    together = CollectivePlan(plan.spec, "nccl2", "grad_allreduce", tuple(ENDPOINTS), 1)
    for each in (plan, plan.spec, together):
        assert again(write_plan(each)) == each


def damaged(change: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(write_plan(planned(fleet.ClipGradByNorm(1.0)))))
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.update(kind="Path"), "plan, kind is 'Path'; expected one of Tr", id="class"),
        pytest.param(lambda d: d.pop("mode"), "plan, mode is None; expected a value", id="missing"),
        pytest.param(lambda d: d.update(more=1), "plan, more is 1; expected nothing", id="unknown"),
        pytest.param(lambda d: d.update(mode=9), "mode is 9; expected one of 0, 1, 2, 3", id="mode"),
        pytest.param(lambda d: d.update(trainers=True), "trainers is True; .* whole number", id="flag"),
        pytest.param(lambda d: d.update(trainers=0), "trainers is 0; expected at least 1", id="no-trainers"),
        pytest.param(
            lambda d: d["spec"]["groups"][0]["options"].update(lr={}),
            "groups, 0, options, lr is an object with nothing; expected a plain value",
            id="option",
        ),
        pytest.param(
            lambda d: d["spec"]["clip"].update(clip_norm=-1),
            "clip_norm is -1; expected a positive",
            id="clip",
        ),
        pytest.param(lambda d: d["blocks"].pop(), "blocks of w is .*; expected each element once", id="gap"),
        pytest.param(lambda d: d["blocks"].reverse(), r"id is \[2, 1, 0\]; expected 0 to 2", id="order"),
        pytest.param(lambda d: d["blocks"][0].update(server=5), "endpoint is '10.* its server", id="server"),
        pytest.param(lambda d: d["blocks"][0].update(dtype="int8"), "blocks of b is .*'int8'", id="dtype"),
        pytest.param(lambda d: d["spec"]["parameters"].pop(), "blocks of each parameter", id="parameter"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(change, message):
    with pytest.raises(TranspileError, match=message):
        again(damaged(change))


def test_a_collective_plan_has_the_number_of_one_of_its_trainers():
    document = write_plan(CollectivePlan(planned().spec, "nccl2", "grad_allreduce", tuple(ENDPOINTS), 2))
    with pytest.raises(TranspileError, match="trainer_id is 2; expected a number from 0 to 1"):
        again(document)
