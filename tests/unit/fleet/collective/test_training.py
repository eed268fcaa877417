"""A collective trainer's checkpoints, with the other trainers left out."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleet.checkpoint import Claims, TrainStatus, write_shard
from fleet.collective.training import CollectiveTraining
from fleet.errors import FleetError
from fleet.loop import Loops
from fleet.role_maker import JobIdentity
from tests.support.collective import GroupOfOne


def make(
    step: int = 0, job: JobIdentity | None = None, loops: Loops | None = None
) -> tuple[CollectiveTraining, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training_of(optimizer, model, step, job, loops), optimizer


def training_of(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    step: int = 0,
    job: JobIdentity | None = None,
    loops: Loops | None = None,
) -> CollectiveTraining:
    steps = SimpleNamespace(number=step)
    synchronizer = cast("Any", SimpleNamespace(steps=steps, equalize=lambda _: None, order=None))
    claims = Claims("trainer-0", job or JobIdentity())
    return CollectiveTraining(
        optimizer, model, synchronizer, cast("Any", GroupOfOne()), claims, loops or Loops()
    )


class WantsMore(torch.optim.SGD):
    """Cannot be built from the options of its param groups."""

    def __init__(self, params: Any, decays: Any) -> None:
        super().__init__(params, lr=decays[0], momentum=0.5)


def test_an_optimizer_that_no_server_could_build_is_saved_and_loaded(tmp_path, caplog):
    """Each trainer steps its own."""
    states = []
    for fill in (1.0, 0.0):
        model = torch.nn.Linear(2, 1)
        optimizer = WantsMore(model.parameters(), [0.1])
        model(torch.full((1, 2), fill)).sum().backward()
        optimizer.step()
        training = training_of(optimizer, model, step=1)
        training.log_unsavable()
        if fill:
            training.save(str(tmp_path), TrainStatus(1))
        assert training.load(str(tmp_path)) == TrainStatus(1, step=1)
        states.append(optimizer.state[model.weight]["momentum_buffer"])
    assert torch.equal(*states)
    assert caplog.text == ""


def test_a_checkpoint_without_its_trainer_part_is_passed_over(tmp_path, caplog):
    training, optimizer = make(step=7)
    for epoch in (1, 2):
        optimizer.param_groups[0]["lr"] = epoch
        training.save_numbered(str(tmp_path), TrainStatus(epoch), keep=0)
        training.wait()
    (part,) = (tmp_path / "checkpoint-1").glob("trainer-*.safetensors")
    part.unlink()
    again, other = make()
    status = again.load(str(tmp_path))
    assert status == TrainStatus(1, step=7)
    assert (again.current_step, other.param_groups[0]["lr"]) == (7, 1)
    assert f"skipped a damaged checkpoint: {part} cannot be read" in caplog.text


def test_a_replaced_trainer_cannot_save(tmp_path):
    survivor, _ = make(3, JobIdentity("digits", "u", 0))
    successor, _ = make(0, JobIdentity("digits", "u", 1))
    survivor.save_numbered(str(tmp_path), TrainStatus(0), keep=1)
    survivor.wait()
    assert successor.load(str(tmp_path)) is not None
    with pytest.raises(FleetError, match=r"has claimed .* with attempt 1"):
        survivor.save_numbered(str(tmp_path), TrainStatus(1), keep=1)
    with pytest.raises(FleetError, match="has claimed"):
        survivor.clean(str(tmp_path), 1)


def test_a_background_save_writes_the_copy(tmp_path, monkeypatch):
    training, optimizer = make(step=7)
    may_go_on = threading.Event()

    def slowly(*arguments: Any) -> Any:
        assert may_go_on.wait(60)
        return write_shard(*arguments)

    monkeypatch.setattr("fleet.collective.training.write_shard", slowly)
    (parameter,) = optimizer.param_groups[0]["params"][:1]
    expected = parameter.detach().clone()
    training.save_numbered(str(tmp_path), TrainStatus(0), keep=0)
    with torch.no_grad():
        parameter.add_(1)
    may_go_on.set()
    training.wait()
    training.load(str(tmp_path))
    assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize(
    ("begun_at", "saved_at", "begins_at"),
    [
        pytest.param(3, 5, 5 - 2, id="the-loop-before-made-fewer-steps-than-it-has"),
        pytest.param(12, 5, 5, id="an-earlier-checkpoint-was-loaded-meanwhile"),
    ],
)
def test_a_checkpoint_can_be_loaded_wherever_the_loops_are(tmp_path, begun_at, saved_at, begins_at):
    loops = Loops()
    loops.end(loops.begin("fleet.steps", 0, 10, 1), 10)
    loops.begin("fleet.steps", begun_at, 20, 1)
    training, _ = make(saved_at, loops=loops)
    training.save(str(tmp_path / "checkpoint"), TrainStatus(0))
    training.wait()
    loops = Loops()
    again, _ = make(loops=loops)
    assert again.load(str(tmp_path / "checkpoint")) == TrainStatus(0, step=saved_at)
    loops.end(loops.begin("fleet.steps", saved_at, 10, 1), 10)
    assert loops.begin("fleet.steps", saved_at, 20, 1) == begins_at


def frozen_and_others(seed: int) -> tuple[CollectiveTraining, torch.nn.ModuleDict]:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("trained", "frozen", "beside")})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD([*model["trained"].parameters(), *model["frozen"].parameters()], lr=0.1)
    return training_of(optimizer, model), model


def test_frozen_parameters_are_restored(tmp_path):
    training, model = frozen_and_others(0)
    training.save(str(tmp_path), TrainStatus())
    again, other = frozen_and_others(1)
    again.load(str(tmp_path))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert [name for name, value in other.named_parameters() if not value.requires_grad] == [
        "frozen.weight",
        "frozen.bias",
    ]


@pytest.mark.parametrize("named", [True, False])
def test_frozen_parameters_without_a_module_are_restored(tmp_path, named):
    def made(seed: int) -> tuple[CollectiveTraining, list[torch.nn.Parameter]]:
        torch.manual_seed(seed)
        each = [torch.nn.Parameter(torch.rand(2), requires_grad=trained) for trained in (True, False)]
        given = [(f"each.{number}", value) for number, value in enumerate(each)] if named else each
        return training_of(torch.optim.SGD(given, lr=0.1), None), each

    training, saved = made(0)
    training.save(str(tmp_path), TrainStatus())
    again, loaded = made(1)
    again.load(str(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(saved, loaded, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_an_embedding_with_sparse_gradients_is_restored_with_its_state(tmp_path, frozen):
    def made(seed: int) -> tuple[CollectiveTraining, torch.nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        return training_of(optimizer, model), model, optimizer

    training, model, optimizer = made(0)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    model.requires_grad_(not frozen)
    training.save(str(tmp_path), TrainStatus())
    again, other, optimizer = made(1)
    again.load(str(tmp_path))
    assert torch.equal(model.weight, other.weight)
    assert (optimizer.state[other.weight]["sum"][1:3] == 1).all()
