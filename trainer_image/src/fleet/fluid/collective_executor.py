"""Collective training with an executor: joins the trainers, and makes the optimizer average gradients."""

import os
import weakref
from collections.abc import MutableMapping

import torch
from torch.optim import Optimizer

from fleet.collective.devices import gpu_number
from fleet.collective.trainer import Trainer, this_trainer
from fleet.errors import ConfigurationError
from fleet.fluid.place import CUDAPlace, Place
from fleet.fluid.program import Program
from fleet.plan.config import DistributeTranspilerConfig
from fleet.plan.job import CollectivePlan
from fleet.plan.source import Source
from fleet.process import lifecycle
from fleet.role_maker import UserDefinedCollectiveRoleMaker
from fleet.strategy import DistributedStrategy

__all__ = ["check_started", "is_started", "start", "take_gpu"]

_started: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def is_started(source: Source) -> bool:
    """Return whether this trainer has joined the others."""
    return source.optimizer in _started


def start(plan: CollectivePlan, source: Source, place: Place) -> Trainer:
    """Join the other trainers, and make the optimizer average gradients; later calls do nothing.

    Raises
    ------
    ConfigurationError
        The place is not the GPU that the environment assigns to this trainer.
    """
    if source.optimizer not in _started:
        if isinstance(place, CUDAPlace):
            take_gpu(place.device_id, os.environ, torch.cuda.device_count())
        strategy = this_trainer.program_strategy
        if strategy is None:  # the script has called the transpiler itself, and not fleet
            lifecycle.start(None)  # from here on, a user's mistake ends the process as it would end a replica
            maker = UserDefinedCollectiveRoleMaker(plan.trainer_id, list(plan.endpoints))
            this_trainer.join(maker.generate_role())
            config = DistributeTranspilerConfig(collective_mode=plan.collective_mode)
            strategy = DistributedStrategy(transpiler=config)
        this_trainer.distribute(source.optimizer, strategy, source.module)
        _started.add(source.optimizer)
        this_trainer.group.barrier("a barrier")
    return this_trainer


def take_gpu(number: int, environ: MutableMapping[str, str], count: int) -> None:
    """Select the GPU of a place for this trainer, unless the environment has already selected one.

    Joining reads this trainer's GPU from the environment, to decide whether NCCL can carry its tensors.

    Parameters
    ----------
    number : int
        The GPU number of the place.
    environ : mutable mapping
        The environment of this process.
    count : int
        The number of visible GPUs.

    Raises
    ------
    ConfigurationError
        The environment names another GPU.
    """
    named = next((name for name in ("FLAGS_selected_gpus", "LOCAL_RANK") if environ.get(name)), None)
    if named is None:
        environ["FLAGS_selected_gpus"] = str(number)
    elif (own := gpu_number(environ, count)) not in (None, number):
        raise ConfigurationError(
            f"place is CUDAPlace({number}), and {named} is {environ[named]!r}, by which GPU {own} is this "
            f"trainer's own; expected fleet.CUDAPlace({own}), or FLAGS_selected_gpus={number}"
        )


def check_started(program: Program, source: Source) -> None:
    """Raise an error if the job has several trainers and the startup program has not run.

    Raises
    ------
    ConfigurationError
        The startup program has not run.
    """
    if program.attrs.get("trainers", 1) != 1 and source.optimizer not in _started:
        raise ConfigurationError(
            "this trainer has not met the others; run the startup program first, "
            "fleet.default_startup_program()"
        )
