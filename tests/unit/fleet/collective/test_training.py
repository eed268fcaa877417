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


class Alone:
    """Stands in for a group of one."""

    def agree(self, key: str, value: str) -> dict[int, str]:
        return {0: value}


def make(
    step: int = 0, job: JobIdentity | None = None, loops: Loops | None = None
) -> tuple[CollectiveTraining, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = SimpleNamespace(number=step)
    synchronizer = cast("Any", SimpleNamespace(steps=steps, settle=lambda _: None, order=None))
    claims = Claims("trainer-0", job or JobIdentity())
    return CollectiveTraining(
        optimizer, model, synchronizer, cast("Any", Alone()), claims, loops or Loops()
    ), optimizer


def test_a_checkpoint_whose_trainers_part_is_gone_is_passed_over_for_the_one_before(tmp_path, caplog):
    training, optimizer = make(step=7)
    for epoch in (1, 2):
        optimizer.param_groups[0]["lr"] = epoch
        training.save_numbered(str(tmp_path), TrainStatus(epoch), keep=0)
        training.background.wait()
    (part,) = (tmp_path / "checkpoint-1").glob("trainer-*.safetensors")
    part.unlink()
    again, other = make()
    status = again.load(str(tmp_path))
    assert status == TrainStatus(1, step=7)
    assert (again.current_step, other.param_groups[0]["lr"]) == (7, 1)
    assert f"passed over a checkpoint: {part} cannot be read" in caplog.text


def test_a_trainer_that_was_replaced_saves_no_more_once_its_successor_has_looked_for_a_checkpoint(tmp_path):
    survivor, _ = make(3, JobIdentity("digits", "u", 0))
    successor, _ = make(0, JobIdentity("digits", "u", 1))
    survivor.save_numbered(str(tmp_path), TrainStatus(0), keep=1)
    survivor.background.wait()
    assert successor.load(str(tmp_path)) is not None
    with pytest.raises(FleetError, match=r"has claimed .* with attempt 1"):
        survivor.save_numbered(str(tmp_path), TrainStatus(1), keep=1)
    with pytest.raises(FleetError, match="has claimed"):
        survivor.clean(str(tmp_path), 1)


def test_what_is_written_in_the_background_is_the_copy_that_was_made(tmp_path, monkeypatch):
    training, optimizer = make(step=7)
    may_go_on = threading.Event()

    def slowly(*arguments: Any) -> Any:
        assert may_go_on.wait(10)
        return write_shard(*arguments)

    monkeypatch.setattr("fleet.collective.training.write_shard", slowly)
    (parameter,) = optimizer.param_groups[0]["params"][:1]
    expected = parameter.detach().clone()
    training.save_numbered(str(tmp_path), TrainStatus(0), keep=0)
    with torch.no_grad():
        parameter.add_(1)
    may_go_on.set()
    training.background.wait()
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
    training.background.wait()
    loops = Loops()
    again, _ = make(loops=loops)
    assert again.load(str(tmp_path / "checkpoint")) == TrainStatus(0, step=saved_at)
    loops.end(loops.begin("fleet.steps", saved_at, 10, 1), 10)
    assert loops.begin("fleet.steps", saved_at, 20, 1) == begins_at
