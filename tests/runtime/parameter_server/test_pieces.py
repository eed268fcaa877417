"""Blocks that travel in pieces: nothing of the result depends on it, and nobody waits for a whole block."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet.checkpoint import Checkpoint, TrainStatus
from fleet.errors import ConfigurationError
from fleet.plan import ClipGradByGlobalNorm, ClipGradByValue, DistributeTranspilerConfig
from tests.support import parameter_server
from tests.support.checkpoints import OPTIMIZERS, differing, train
from tests.support.parameter_server import Loopback, loopback
from tests.support.threads import at_once, one_torch_thread


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Equal to the bit is promised at one torch thread."""
    with one_torch_thread():
        yield


def in_pieces(piece_bytes: int | None) -> Any:
    return replace(parameter_server.QUICK, piece_bytes=piece_bytes)


def learned(piece_bytes: int | None, script: Any = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Train four steps with two trainers, and return the parameters and the optimizer's state.

    `script` makes the first trainer's differ from the servers'.
    """
    with loopback(servers=2, trainers=2, settings=in_pieces(piece_bytes), **arguments) as job:
        (zero, model, _), (one, other, _) = job.make_trainer(0, **(script or {})), job.make_trainer(1)
        at_once(zero.start, one.start)
        at_once(lambda: train(zero, model, range(4)), lambda: train(one, other, range(4, 8)))
        state = {
            f"{name}.{entry}": torch.as_tensor(value)
            for name, entries in zero.fetch_state().items()
            for entry, value in entries.items()
        }
        at_once(zero.complete, one.complete)
        return {name: value.clone() for name, value in model.state_dict().items()} | state


@pytest.mark.parametrize("clip", [None, ClipGradByValue(0.01), ClipGradByGlobalNorm(0.01)], ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("each_transport")
def test_a_job_in_pieces_learns_the_same_to_the_bit(name, clip):
    whole, pieces = (learned(size, optimizer=OPTIMIZERS[name], grad_clip=clip) for size in (None, 256))
    assert whole.keys() == pieces.keys()
    assert [key for key in whole if not torch.equal(whole[key], pieces[key])] == []


def trained_to(step: int, job: Loopback) -> tuple[Any, Any]:
    trainer, model, _ = job.make_trainer()
    trainer.start()
    train(trainer, model, range(trainer.current_step, step))
    return trainer, model


@pytest.mark.parametrize("later", [None, 256, 1024])
@pytest.mark.parametrize("earlier", [None, 256])
def test_a_checkpoint_holds_blocks_and_serves_every_size_of_pieces(tmp_path, earlier, later):
    adam = OPTIMIZERS["adam"]
    with loopback(servers=2, optimizer=adam, settings=in_pieces(earlier)) as job:
        trainer, _ = trained_to(3, job)
        trainer.save(str(tmp_path), TrainStatus())
        expected = trained_on(trainer, 6)
    blocks = [block for file in Checkpoint(tmp_path).manifest.files for block in file.blocks]
    assert len(blocks) == 7
    with loopback(tmp_path, servers=3, optimizer=adam, settings=in_pieces(later)) as job:
        trainer, model = trained_to(6, job)
        assert differing(model, expected) == []


def trained_on(trainer: Any, step: int) -> dict[str, torch.Tensor]:
    """Go on with a trainer, and return the values that follow."""
    model = trainer._source.module
    train(trainer, model, range(trainer.current_step, step))
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_trainer_cuts_as_the_servers_do_whatever_its_own_script_says():
    uncut = {"config": DistributeTranspilerConfig(slice_var_up=False)}
    told, alike = learned(256, script=uncut), learned(256)
    assert [key for key in alike if not torch.equal(told[key], alike[key])] == []


def test_servers_that_cut_parameters_otherwise_are_refused_with_what_they_hold(caplog):
    with loopback(servers=2) as job:
        job.servers.pop().server.close()
        job._config = DistributeTranspilerConfig(slice_var_up=False)
        job.start_server(1)
        trainer, _, _ = job.make_trainer()
        with pytest.raises(
            ConfigurationError, match=r"hold these elements of .*: .*; expected each from 0 to"
        ):
            trainer.start()
