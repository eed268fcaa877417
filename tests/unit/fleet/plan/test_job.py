"""A job's plan: trainers and servers come to the same blocks, and to what is stepped how."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet
from fleet.errors import TranspileError
from fleet.plan import (
    DistributedMode,
    DistributeTranspilerConfig,
    HashName,
    NormPlan,
    RoundRobin,
    ServerPlan,
    TrainerPlan,
    describe_difference,
)
from fleet.plan.capture import capture_loop
from fleet.plan.job import JobPlan, plan_job
from tests.support.programs import Parameters

ENDPOINTS = [f"10.0.0.{number}:6174" for number in range(1, 6)]
ONE, TWO, THREE, *_ = ENDPOINTS


class Job:
    """A job over parameters of given shapes, as its processes plan it."""

    def __init__(
        self,
        shapes: Any = None,
        optimizer: str = "SGD",
        *,
        servers: int = 2,
        trainers: int = 2,
        clip: Any = None,
        options: Any = None,
        **fields: Any,
    ) -> None:
        module = Parameters(shapes if shapes is not None else {"w": (400, 100), "b": (100,)})
        made = getattr(torch.optim, optimizer)(module.parameters(), **{"lr": 0.1, **(options or {})})
        self.spec, self.source = capture_loop(made, module, clip)
        config = DistributeTranspilerConfig(**fields)
        self.plan: JobPlan = plan_job(self.spec, self.source, config, ENDPOINTS[:servers], trainers)

    def trainer(self, number: int = 0) -> TrainerPlan:
        return self.plan.trainer(number, self.source)

    def server(self, endpoint: str = ONE) -> ServerPlan:
        return self.plan.server(endpoint, self.source)


dims = st.lists(st.integers(1, 300), min_size=0, max_size=2).map(tuple)


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), dims, min_size=1),
    st.integers(1, 5),
    st.integers(1, 4),
    st.data(),
)
def test_servers_hold_what_trainers_send(shapes, servers, trainers, data):
    trainer_id = data.draw(st.integers(0, trainers - 1))
    job = Job(
        shapes,
        servers=servers,
        trainers=trainers,
        split_method=data.draw(st.sampled_from([RoundRobin, HashName])),
        slice_var_up=data.draw(st.booleans()),
    )
    endpoints = ENDPOINTS[:servers]
    trainer, plans = job.trainer(trainer_id), [job.server(endpoint) for endpoint in endpoints]

    held = sorted((block for plan in plans for block in plan.blocks), key=lambda block: block.id)
    assert tuple(held) == trainer.blocks
    assert [block.id for block in held] == list(range(len(held)))
    assert sorted(trainer.send_order) == list(range(len(held)))
    for index, plan in enumerate(plans):
        assert plan.blocks == trainer.blocks_on(index)
        assert plan.fingerprint == trainer.fingerprint
        assert (plan.server, plan.endpoint, plan.trainers) == (index, endpoints[index], trainers)
        assert set(plan.groups) == {block.group for block in plan.blocks}
    for name, shape in shapes.items():
        blocks = trainer.blocks_of(name)
        assert blocks[0].begin == 0
        assert blocks[-1].end == torch.Size(shape).numel()
        assert all(block.param_shape == tuple(shape) for block in blocks)
        assert all(a.end == b.begin for a, b in pairwise(blocks))


def test_the_latest_created_parameter_is_sent_first():
    job = Job({"w": (400, 100), "b": (3,), "a": (5,)})
    names = {block.id: block.name for block in job.plan.blocks}
    assert [names[number] for number in job.trainer().send_order] == ["a", "b", "w.block0", "w.block1"]
    assert [block.name for block in job.plan.blocks] == ["a", "b", "w.block0", "w.block1"]


def test_a_server_that_holds_nothing_has_an_empty_plan():
    plan = Job({"w": (3,)}, servers=3).server(THREE)
    assert (plan.blocks, plan.groups) == ((), {})


def test_the_options_of_a_group_are_those_of_the_optimizer():
    plan = Job(options={"weight_decay": 0.01, "momentum": 0.9, "nesterov": True}).server()
    assert plan.groups[0].optimizer_class is torch.optim.SGD
    assert plan.groups[0].hyper_parameters == {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0,
        "weight_decay": 0.01,
        "nesterov": True,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }


@pytest.mark.parametrize(
    "name",
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
def test_every_option_of_an_optimizer_reaches_the_servers(name):
    job = Job({"w": (3, 2)}, name, servers=1, options={"lr": torch.tensor(0.25)})
    group = {key: value for key, value in job.source.optimizer.param_groups[0].items() if key != "params"}
    plan = job.server().groups[0]
    assert plan.hyper_parameters == {**group, "lr": 0.25}
    assert plan.elementwise
    assert plan.tensors == {"lr": "float32"}


def test_param_groups_keep_their_options():
    module = Parameters({"w": (3, 2), "b": (2,)})
    optimizer = torch.optim.Adam(
        [{"params": [module.w], "weight_decay": 0.1}, {"params": [module.b], "lr": 0.5}], lr=0.01
    )
    spec, source = capture_loop(optimizer, module)
    plan = plan_job(spec, source, DistributeTranspilerConfig(), [ONE], 2).server(ONE, source)
    assert {block.param: block.group for block in plan.blocks} == {"w": 0, "b": 1}
    found = [
        (plan.groups[i].hyper_parameters["lr"], plan.groups[i].hyper_parameters["weight_decay"])
        for i in (0, 1)
    ]
    assert found == [(0.01, 0.1), (0.5, 0.0)]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        pytest.param({"trainers": 3}, "trainers: 2 here, 3 there", id="trainers"),
        pytest.param({"servers": 3}, "endpoints: .* here, .* there", id="endpoints"),
        pytest.param({"shapes": {"w": (400, 101)}}, r"parameter w: float32\[400, 100\].*101\]", id="shape"),
        pytest.param(
            {"shapes": {"v": (400, 100)}},
            "parameter w: .* here, nothing there; parameter v: nothing",
            id="name",
        ),
        pytest.param({"optimizer": "Adam"}, r"sgd: torch.*SGD.* here, adam: torch.*Adam", id="optimizer"),
        pytest.param(
            {"options": {"maximize": True}}, "maximize=False.* here, .*maximize=True", id="structure"
        ),
    ],
)
def test_fingerprints_differ_and_say_in_what(change, difference):
    ours, theirs = Job({"w": (400, 100)}).trainer(), Job(**{"shapes": {"w": (400, 100)}, **change}).trainer()
    assert ours.fingerprint != theirs.fingerprint
    assert re.search(difference, describe_difference(ours.agreement, theirs.agreement))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"trainer_id": 1}, id="trainer-id"),
        pytest.param({"options": {"lr": 0.5}}, id="learning-rate"),
        pytest.param({"options": {"foreach": True}}, id="kernel-flags"),
        pytest.param({"print_log": True}, id="logging"),
        pytest.param({"min_block_size": 10000}, id="where-blocks-lie-as-servers-tell-it"),
    ],
)
def test_fingerprints_ignore_what_may_differ(change):
    number = change.get("trainer_id", 0)
    ours = Job().trainer()
    theirs = Job(**{name: value for name, value in change.items() if name != "trainer_id"}).trainer(number)
    assert ours.fingerprint == theirs.fingerprint
    assert describe_difference(ours.agreement, theirs.agreement) == ""


def test_a_long_difference_is_cut_short():
    ours = {f"fact {i}": "a" for i in range(9)}
    assert describe_difference(ours, dict.fromkeys(ours, "b")).endswith("; and 6 more")


SHAPES = {"b": (100,), "w": (300, 100)}  # b on ONE; w in three slices, on TWO, THREE and ONE


def clipped(clip: Any, **fields: Any) -> Job:
    return Job(SHAPES, servers=3, clip=clip, options={"weight_decay": 0.1}, **fields)


def test_the_norm_of_a_parameter_names_the_servers_that_hold_a_slice():
    clipping = clipped(fleet.ClipGradByNorm(5.0)).server().clipping
    assert clipping.norms == (NormPlan("b", 5.0, (0,), (0,)), NormPlan("w", 5.0, (3,), (0, 1, 2)))
    assert clipping.ranges == {}


def test_the_global_norm_is_one_over_every_server_that_holds_something():
    clip = fleet.ClipGradByGlobalNorm(5)
    assert clipped(clip).server().clipping.norms == (NormPlan("", 5.0, (0, 3), (0, 1, 2)),)
    whole = clipped(clip, slice_var_up=False)
    assert whole.server().clipping.norms == (NormPlan("", 5.0, (0,), (0, 1)),)
    assert whole.server(THREE).clipping.norms == ()


def test_a_range_concerns_each_block_alone():
    clipping = clipped(fleet.ClipGradByValue(2.0, -1.0)).server().clipping
    assert clipping.ranges == {0: (-1.0, 2.0), 3: (-1.0, 2.0)}
    assert clipping.norms == ()


@settings(deadline=None, max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), dims, min_size=1),
    st.integers(1, 5),
    st.sampled_from([fleet.ClipGradByNorm(2.0), fleet.ClipGradByGlobalNorm(2.0)]),
    st.sampled_from([RoundRobin, HashName]),
)
def test_every_block_has_a_part_in_one_norm_that_all_its_servers_know(shapes, servers, clip, split_method):
    job = Job(shapes, servers=servers, clip=clip, split_method=split_method)
    plans = [job.server(endpoint) for endpoint in ENDPOINTS[:servers]]
    norms = [(plan.server, norm) for plan in plans for norm in plan.clipping.norms]
    assert sorted(block for _, norm in norms for block in norm.blocks) == list(
        range(sum(len(plan.blocks) for plan in plans))
    )
    for key in {norm.key for _, norm in norms}:
        holders = tuple(server for server, norm in norms if norm.key == key)
        assert {norm.servers for _, norm in norms if norm.key == key} == {holders}
    keys = {norm.key for _, norm in norms}
    assert keys == ({""} if isinstance(clip, fleet.ClipGradByGlobalNorm) else set(shapes))


@pytest.mark.parametrize(
    ("fields", "mode"),
    [({"sync_mode": False}, "half-async"), ({"sync_mode": False, "runtime_split_send_recv": True}, "async")],
)
def test_clipping_in_other_modes_than_sync_is_refused_with_the_remedy(fields, mode):
    with pytest.raises(TranspileError, match=f"the mode is {mode}; .*overlap=False"):
        clipped(fleet.ClipGradByValue(1.0), **fields)


def test_clipping_in_a_mode_of_the_user_s_own_is_refused_too():
    class Own:
        name = "sync"
        programs = DistributedMode.SYNC

        def agreement(self):
            return {}

    job = clipped(fleet.ClipGradByValue(1.0))
    with pytest.raises(TranspileError, match=r"the mode is 'sync'; .*overlap=False"):
        plan_job(job.spec, job.source, DistributeTranspilerConfig(), [ONE], 1, custom=Own())


@pytest.mark.parametrize("path", ["os.path.join", "torch.optim.sgd.Adam", "torch.optim.lr_scheduler.StepLR"])
def test_only_pytorchs_own_optimizers_are_found_without_their_source(path):
    """A text must not choose what is imported."""
    job = Job()
    assert job.plan.server(ONE, None).groups[0].optimizer_class is torch.optim.SGD
    other = replace(job.spec, groups=(replace(job.spec.groups[0], optimizer=path),))
    with pytest.raises(TranspileError, match=rf"stepped by {path}, .* program\.source = captured\.source"):
        replace(job.plan, spec=other).server(ONE, job.source)
