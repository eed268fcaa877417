"""Checkpoints of whole jobs, in one process over loopback: what is saved, and how training goes on."""

import copy
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet.checkpoint import Checkpoint, TrainStatus, commit, find_checkpoint, list_numbers
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.parameter_server.modes import Async, Geo, HalfAsync
from fleet.parameter_server.trainer import agreement
from fleet.parameter_server.trainer.rows import TrainerRows
from tests.support.checkpoints import BATCHES, OPTIMIZERS, alone, differing, loss_of, saved, train
from tests.support.parameter_server import Loopback, loopback, small_model
from tests.support.processes import wait_for
from tests.support.threads import at_once, one_torch_thread


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Equal to the bit is promised at one torch thread."""
    with one_torch_thread():
        yield


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_and_ten_more_equal_twenty_to_the_bit(tmp_path, name, servers):
    optimizer = OPTIMIZERS[name]
    saved(tmp_path, 10, optimizer=optimizer)
    with loopback(tmp_path, servers=servers, optimizer=optimizer) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 10
        assert differing(model, alone(optimizer, 10)) == []
        train(trainer, model, range(10, 20))
        assert trainer.current_step == 20
        assert differing(model, alone(optimizer, 20)) == []


def test_a_trainer_may_ask_the_servers_to_load_before_its_first_step(tmp_path):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        assert zero.current_step == 0
        at_once(lambda: zero.load(str(tmp_path)), lambda: one.load(str(tmp_path)))
        assert (zero.current_step, one.current_step) == (3, 3)
        at_once(lambda: train(zero, model, range(3, 5)), lambda: train(one, other, range(3, 5)))
        assert differing(model, dict(other.state_dict())) == []
        assert zero.current_step == 5


@pytest.mark.parametrize("mode", [None, Async()], ids=["sync", "async"])
def test_a_trainer_may_join_while_another_has_the_servers_load(tmp_path, monkeypatch, mode):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2, **({} if mode is None else {"mode": mode})) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        zero.start()
        look = agreement.loaded_and_steps

        def loaded_after_that(*given: Any) -> Any:
            found = look(*given)
            zero.load(str(tmp_path))
            return found

        monkeypatch.setattr(agreement, "loaded_and_steps", loaded_after_that)
        one.start()
        assert (zero.current_step, one.current_step) == (3, 0)
        one.load(str(tmp_path))
        assert one.current_step == 3
        at_once(lambda: train(zero, model, range(3, 5)), lambda: train(one, other, range(3, 5)))
        assert zero.current_step == one.current_step == 5


def test_a_trainer_may_join_while_one_server_has_loaded_and_another_has_not(tmp_path, monkeypatch):
    saved(tmp_path, 3)
    with loopback(servers=2, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        zero.start()
        seen = threading.Event()
        first, second = (server.server.loader for server in job.servers)
        look, agree, read = agreement.loaded_and_steps, agreement.agree, second._read

        def read_later(checkpoint: Any) -> Any:
            assert seen.wait(60)
            return read(checkpoint)

        def look_amid_the_load(*given: Any) -> Any:
            loading.start()
            wait_for(lambda: first.restored, "the first server to load")
            return look(*given)

        def agree_in_the_end(*given: Any) -> Any:
            seen.set()
            return agree(*given)

        monkeypatch.setattr(second, "_read", read_later)
        monkeypatch.setattr(agreement, "loaded_and_steps", look_amid_the_load)
        monkeypatch.setattr(agreement, "agree", agree_in_the_end)
        loading = threading.Thread(target=zero.load, args=[str(tmp_path)])
        one.start()
        loading.join(60)
        assert (zero.current_step, one.current_step) == (3, 3)
        at_once(lambda: train(zero, model, range(3, 5)), lambda: train(one, other, range(3, 5)))
        assert differing(model, dict(other.state_dict())) == []


@pytest.mark.parametrize("begins", [False, True], ids=["and-waits", "and-begins-a-step"])
def test_a_trainer_may_take_a_tables_rows_while_another_has_the_servers_load(tmp_path, monkeypatch, begins):
    def table() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Embedding(40, 4, sparse=True)

    def step(trainer: Any, embedding: Any) -> None:
        embedding.zero_grad()
        embedding(torch.arange(5)).sum().backward()
        trainer.step()

    with loopback(model=table, servers=2) as job:
        trainer, embedding, _ = job.make_trainer()
        trainer.start()
        for _ in range(3):
            step(trainer, embedding)
        trainer.save(str(tmp_path), TrainStatus())
        trainer.complete()
    with loopback(model=table, servers=2, trainers=2) as job:
        (zero, mine, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        zero.start()
        take_all = TrainerRows.take_all

        def loaded_before_that(rows: TrainerRows) -> None:
            monkeypatch.undo()
            zero.load(str(tmp_path))
            if begins:
                stepping.start()
                loaders = [server.server.loader for server in job.servers]
                wait_for(lambda: all(each._begun for each in loaders), "the step to begin")
            take_all(rows)

        stepping = threading.Thread(target=step, args=(zero, mine))
        monkeypatch.setattr(TrainerRows, "take_all", loaded_before_that)
        one.start()
        one.load(str(tmp_path))
        assert one.current_step == 3
        if not begins:
            stepping.start()
        step(one, other)
        stepping.join(60)
        assert torch.equal(mine.weight, other.weight)
        assert not torch.equal(mine.weight, embedding.weight)


def test_a_checkpoint_names_those_before_it_in_its_training(tmp_path):
    def go_on(loaded: str, *names: str) -> list[tuple[str, ...] | None]:
        with loopback(tmp_path / loaded if loaded else None, servers=2) as job:
            trainer, model, _ = job.make_trainer()
            trainer.start()
            for name in names:
                train(trainer, model, range(trainer.current_step, trainer.current_step + 1))
                trainer.save(str(tmp_path / name), TrainStatus())
            trainer.complete()
        return [Checkpoint(tmp_path / name).manifest.after for name in names]

    def save(name: str) -> str:
        return Checkpoint(tmp_path / name).manifest.save

    assert go_on("", "a", "b") == [(), (save("a"),)]
    assert go_on("a", "c", "d") == [(save("a"),), (save("a"), save("c"))]
    assert go_on("d", "e") == [(save("a"), save("c"), save("d"))]
    path = tmp_path / "e"
    with loopback(servers=2) as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.save(str(tmp_path / "other"), TrainStatus())  # of what there is before the load
        trainer.load(str(path))
        trainer.save(str(tmp_path / "again"), TrainStatus())
        trainer.complete()
    assert Checkpoint(tmp_path / "again").manifest.after == (*map(save, "acde"),)
    said = replace(Checkpoint(path).manifest, after=None)
    commit(path, said.to_json())
    assert go_on("e", "f") == [None]


def test_a_restarted_trainer_that_loads_keeps_what_the_servers_have_learned_since(tmp_path):
    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        train(trainer, model, range(2))
        trainer.save(str(tmp_path), TrainStatus(epoch_no=4))
        train(trainer, model, range(2, 5))
        again, later, _ = job.make_trainer(attempt=1)
        again.start()
        status = again.load(str(tmp_path))
        assert status == TrainStatus(epoch_no=4, step=2)
        assert again.current_step == 5
        assert differing(later, dict(model.state_dict())) == []


def test_a_save_holds_one_step_although_another_trainer_is_ahead(tmp_path):
    with loopback(servers=2, trainers=2) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        at_once(lambda: train(zero, model, range(1)), lambda: train(one, other, range(1)))
        after_one = copy.deepcopy(dict(model.state_dict()))
        ahead = threading.Thread(target=train, args=(one, other, range(1, 2)), daemon=True)
        ahead.start()  # its gradients of the next step arrive before, during or after the save
        server = job.servers[0].server
        while not server.heartbeat(0, 0).waiting_for:
            pass
        zero.save(str(tmp_path), TrainStatus())
        train(zero, model, range(1, 2))
        ahead.join(60)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.manifest.step == 1
    for name, value in after_one.items():
        piece = checkpoint.piece(name, 0, value.numel(), tuple(value.shape))
        assert torch.equal(piece.value, value), name


def test_saving_between_backward_and_step_is_refused(tmp_path):
    with loopback() as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        loss_of(model, BATCHES[0]).backward()
        with pytest.raises(FleetError, match="a checkpoint was requested"):
            trainer.save(str(tmp_path), TrainStatus())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [HalfAsync(send_queue_size=8), Geo(push_nums=8)], ids=lambda mode: mode.name)
def test_a_save_and_an_export_hold_the_steps_that_the_servers_do_not_have_yet(tmp_path, mode):
    with loopback(servers=2, mode=mode) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        before = copy.deepcopy(dict(model.state_dict()))
        train(trainer, model, range(3))
        trainer.save(str(tmp_path), TrainStatus())
        held = {name: value.clone() for name, value in model.state_dict().items()}
        assert Checkpoint(tmp_path).manifest.step == 3
        for name, value in held.items():
            piece = Checkpoint(tmp_path).piece(name, 0, value.numel(), tuple(value.shape))
            assert torch.allclose(piece.value, value, atol=1e-6), name
            assert not torch.equal(piece.value, before[name]), name
        train(trainer, model, range(3, 5))
        exported = trainer.export()
        assert all(
            torch.allclose(exported[name], value, atol=1e-6) for name, value in model.state_dict().items()
        )
        assert not torch.equal(exported["0.bias"], held["0.bias"])
    with loopback(tmp_path, servers=1, mode=mode) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 3
        assert all(torch.allclose(value, held[name], atol=1e-6) for name, value in model.state_dict().items())


def test_optimizer_state_of_trainers_and_of_servers_is_not_taken_for_each_other(tmp_path):
    adam = OPTIMIZERS["adam"]
    saved(tmp_path / "geo", 1, optimizer=adam, mode=Geo(1))
    saved(tmp_path / "sync", 1, optimizer=adam)
    for directory, mode, words in (
        ("geo", None, "state of the optimizer: nothing here, in the trainer's part there"),
        ("sync", Geo(1), "has the state of optimizers on the servers"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Loopback(optimizer=adam, mode=mode).start_server(0, tmp_path / directory)


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    saved(tmp_path, 1)
    job = Loopback(optimizer=OPTIMIZERS["adam"])
    with pytest.raises(CheckpointError, match=r"model or optimizer: optimizer of param group 0: adam.* sgd"):
        job.start_server(0, tmp_path)


def test_buffers_learning_rate_and_the_scripts_state_come_back(tmp_path):
    def with_statistics() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    with loopback(model=with_statistics) as job:
        trainer, model, optimizer = job.make_trainer()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        trainer.start()
        for step in range(3):
            train(trainer, model, range(step, step + 1))
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what the distributed optimizer does
            scheduler.step()
        trainer.save(str(tmp_path), TrainStatus(3, state={"scheduler": scheduler.state_dict()}))
        expected = copy.deepcopy(dict(model.state_dict()))
    with loopback(tmp_path, model=with_statistics) as job:
        trainer, model, optimizer = job.make_trainer()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        trainer.start()
        status = trainer.load(str(tmp_path))
        assert status is not None
        scheduler.load_state_dict(dict(status.state["scheduler"]))
        assert (status.epoch_no, status.next(), status.step) == (3, 4, 3)
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert scheduler.last_epoch == 3
        assert int(model[1].num_batches_tracked) == 3
        assert differing(model, expected) == []


def test_a_teacher_inside_of_the_model_goes_on_to_the_bit(tmp_path):
    def with_teacher() -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.Linear(20, 4).requires_grad_(False))

    def steps(trainer: Any, model: Any, which: range) -> None:
        student, teacher = model
        for step in which:
            model.zero_grad()
            (student(BATCHES[step]) - teacher(BATCHES[step])).square().mean().backward()
            trainer.step()
            with torch.no_grad():
                teacher.weight.lerp_(student.weight, 0.1)

    seed = 0
    with loopback(servers=2, model=with_teacher) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        steps(trainer, model, range(10))
        trainer.save(str(tmp_path), TrainStatus())
        steps(trainer, model, range(10, 20))
        expected = copy.deepcopy(dict(model.state_dict()))
    seed = 1
    with loopback(tmp_path, servers=2, trainers=2, model=with_teacher) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0), job.make_trainer(1)
        at_once(zero.start, one.start)
        assert differing(model, dict(other.state_dict())) == []
    with loopback(tmp_path, servers=2, model=with_teacher) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        steps(trainer, model, range(10, 20))
        assert differing(model, expected) == []


def test_numbered_checkpoints_are_counted_up_and_the_newest_are_kept(tmp_path):
    folder = str(tmp_path)
    with loopback(servers=2) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        for step in range(3):
            train(trainer, model, range(step, step + 1))
            assert trainer.save_numbered(folder, TrainStatus(step), keep=0) == step
        trainer.checkpoints.wait()
        assert list_numbers(tmp_path) == [0, 1, 2]
        trainer.checkpoints.clean(folder, 2)
        assert list_numbers(tmp_path) == [1, 2]
        assert trainer.save_numbered(folder, TrainStatus(3), keep=1) == 3
        trainer.checkpoints.wait()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3"]
    newest = find_checkpoint(tmp_path)
    assert newest is not None
    assert newest.directory == tmp_path / "checkpoint-3"


def test_what_an_optimizer_has_loaded_before_the_first_step_goes_on_on_the_servers():
    make = OPTIMIZERS["adam"]
    model = small_model()
    before = make(model.parameters())
    for step in range(3):
        before.zero_grad()
        loss_of(model, BATCHES[step]).backward()
        before.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(before.state_dict())

    def trained() -> Any:
        loaded = small_model()
        loaded.load_state_dict(weights)
        return loaded

    def resumed(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    with loopback(servers=2, model=trained, optimizer=resumed) as job:
        fresh, _, _ = job.make_trainer(optimizer=make)
        with pytest.raises(ConfigurationError, match="state of the optimizer before the first step: of 6"):
            fresh.start()
        trainer, module, _ = job.make_trainer()
        trainer.start()
        train(trainer, module, range(3, 6))
        assert differing(module, alone(make, 6)) == []


def test_each_trainer_of_an_async_job_goes_on_at_its_own_step_with_its_own_status(tmp_path, caplog):
    with loopback(servers=2, trainers=3, mode=Async()) as job:
        trainers = [job.make_trainer(index) for index in range(3)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        for (trainer, model, _), steps in zip(trainers, (7, 3, 5), strict=True):
            train(trainer, model, range(steps))
        trainers[1][0].submit_status(TrainStatus(1, state={"seen": [1, 2]}))
        trainers[0][0].save_numbered(str(tmp_path), TrainStatus(6), keep=0)
        trainers[0][0].checkpoints.wait()
        # Restarted alone, while the others go on: what it has said itself, and never what another has.
        again, _, _ = job.make_trainer(1, attempt=1)
        again.start()
        assert again.load(str(tmp_path)) == TrainStatus(1, 3, {"seen": [1, 2]})
        other, _, _ = job.make_trainer(2, attempt=1)
        other.start()
        assert other.load(str(tmp_path)) == TrainStatus(-1, 5)
        assert "the checkpoint has no status of trainer 2, which had made 5 steps" in caplog.text
    manifest = Checkpoint(tmp_path / "checkpoint-0").manifest
    assert [file.trainer for file in manifest.files] == [-1, 0, 1, -1]
    # The whole job anew, with a trainer more: that one has no share behind it, and takes trainer 0's word.
    with loopback(tmp_path, servers=2, trainers=4, mode=Async()) as job:
        trainers = [job.make_trainer(index) for index in range(4)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        statuses = [trainer.load(str(tmp_path)) for trainer, _, _ in trainers]
        assert [status.epoch_no for status in statuses if status is not None] == [6, 1, -1, 6]
        assert [trainer.current_step for trainer, _, _ in trainers] == [7, 3, 5, 7]


def test_in_step_a_trainer_without_a_status_of_that_step_has_the_first_ones(tmp_path):
    with loopback(servers=1, trainers=3) as job:
        trainers = [job.make_trainer(index) for index in range(3)]
        at_once(*(trainer.start for trainer, _, _ in trainers))

        def step(first: int) -> None:
            at_once(*(lambda one=one: train(one[0], one[1], range(first, first + 1)) for one in trainers))

        step(0)
        trainers[2][0].submit_status(TrainStatus(0, state={"of": "step 1"}))
        step(1)
        trainers[1][0].submit_status(TrainStatus(1, state={"of": "trainer 1"}))
        trainers[0][0].save(str(tmp_path), TrainStatus(1, state={"of": "trainer 0"}))
    with loopback(tmp_path, servers=1, trainers=3) as job:
        trainers = [job.make_trainer(index) for index in range(3)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        statuses = [trainer.load(str(tmp_path)) for trainer, _, _ in trainers]
        assert [status.state["of"] for status in statuses if status is not None] == [
            "trainer 0",
            "trainer 1",
            "trainer 0",
        ]
        assert {trainer.current_step for trainer, _, _ in trainers} == {2}


def test_a_trainer_that_comes_back_finds_its_status_though_its_checkpoint_was_cleaned_away(tmp_path):
    with loopback(servers=2, trainers=2) as job:
        (zero, _, _), (one, _, _) = trainers = [job.make_trainer(index) for index in range(2)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        one.submit_status(TrainStatus(4))
        zero.save_numbered(str(tmp_path), TrainStatus(4), keep=0)
        zero.checkpoints.wait()
    with loopback(tmp_path, servers=2, trainers=2) as job:
        trainers = [job.make_trainer(index) for index in range(2)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        shutil.rmtree(tmp_path / "checkpoint-0")
        again, _, _ = job.make_trainer(1, attempt=1)
        again.start()
        replies = again.session.calls.ask_all(lambda control, seconds: control.checkpoints.load("", seconds))
        assert all(reply.status for reply in replies)


def test_a_status_that_is_gone_is_damage(tmp_path, caplog):
    with loopback(servers=1, trainers=2, mode=Async()) as job:
        (zero, _, _), (one, _, _) = trainers = [job.make_trainer(index) for index in range(2)]
        at_once(*(trainer.start for trainer, _, _ in trainers))
        for epoch in range(2):
            one.submit_status(TrainStatus(epoch))
            zero.save_numbered(str(tmp_path), TrainStatus(epoch), keep=0)
        zero.checkpoints.wait()
    (path,) = (tmp_path / "checkpoint-1").glob("trainer-1-*.safetensors")
    path.unlink()
    with loopback(tmp_path, servers=1, trainers=2, mode=Async()) as job:
        one, _, _ = job.make_trainer(1)
        one.start()
        status = one.load(str(tmp_path))
        assert status is not None
        assert status.epoch_no == 0
    assert f"skipped a damaged checkpoint: {path} cannot be read" in caplog.text
