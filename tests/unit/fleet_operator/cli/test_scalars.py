"""What the trainers tell, as TensorBoard itself reads it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fleet_operator.api import Role
from fleet_operator.cli.replica import ReplicaView
from fleet_operator.cli.scalars import Scalars, ScalarsError
from fleet_operator.plan.observe.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_each_point_is_written_once_and_the_rest_as_the_step_moves(tmp_path):
    trainer, server = ReplicaView(Role.TRAINER, 1), ReplicaView(Role.PSERVER, 0)
    server.progress = Progress(step=1)
    scalars = Scalars(tmp_path)
    for progress in (
        None,
        Progress(loss=1.0),
        Progress(2, loss=0.5, history={1: 1.0, 2: 0.5}),
        Progress(2, loss=0.5, history={1: 1.0, 2: 0.5}, samples_per_second=8.0),
        Progress(4, metrics={"accuracy": 0.75}, history={1: 1.0, 2: 0.5, 4: 0.25}, samples_per_second=16.0),
    ):
        trainer.progress = progress
        scalars.take([server, trainer])
    scalars.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trainer-1"]
    assert read(tmp_path / "trainer-1") == {
        "loss": [(1, 1.0), (2, 0.5), (4, 0.25)],
        "accuracy": [(4, 0.75)],
        "samples_per_second": [(4, 16.0)],
    }


def test_what_came_after_the_step_at_which_a_trainer_goes_on_does_not_count(tmp_path):
    trainer = ReplicaView(Role.TRAINER, 0)
    scalars = Scalars(tmp_path)
    history = {1: 1.0, 2: 0.5, 3: 0.25, 4: 0.125}
    for progress in (
        Progress(4, history=history),
        Progress(2, history=history | {2: 8.0}),  # the later points are those of its earlier life
        Progress(4, history=history | {2: 8.0, 4: 4.0}),
    ):
        trainer.progress = progress
        scalars.take([trainer])
    scalars.close()
    assert read(tmp_path / "trainer-0")["loss"] == [(1, 1.0), (2, 8.0), (4, 4.0)]


def test_without_the_package_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ScalarsError, match=r"pip install 'fleet-operator\[tensorboard\]'"):
        Scalars(tmp_path)
