"""Collective training with an executor; the optimizer averages gradients as in a script's own loop."""

import os
import weakref
from collections.abc import MutableMapping

import torch
from torch.optim import Optimizer

from fleet.collective import Fleet, fleet
from fleet.collective.devices import gpu_number
from fleet.errors import ConfigurationError
from fleet.fluid.place import CUDAPlace, Place
from fleet.fluid.program import Program
from fleet.plan.config import DistributeTranspilerConfig
from fleet.plan.job import CollectivePlan
from fleet.plan.source import Source
from fleet.role_maker import UserDefinedCollectiveRoleMaker
from fleet.strategy import DistributedStrategy

__all__ = ["check_started", "start", "take_gpu"]

_started: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def start(plan: CollectivePlan, source: Source, place: Place) -> Fleet:
    """Join the other trainers and distribute the optimizer; later calls do nothing.

    Raises
    ------
    ConfigurationError
        The place is not the GPU that the environment assigns to this trainer.
    """
    if source.optimizer not in _started:
        if isinstance(place, CUDAPlace):
            take_gpu(place.device_id, os.environ, torch.cuda.device_count())
        fleet.init(UserDefinedCollectiveRoleMaker(plan.trainer_id, list(plan.endpoints)))
        config = DistributeTranspilerConfig(collective_mode=plan.collective_mode)
        strategy = DistributedStrategy(transpiler=config)
        fleet.distributed_optimizer(source.optimizer, strategy, source.module)
        _started.add(source.optimizer)
        fleet.init_worker()
    return fleet


def take_gpu(number: int, environ: MutableMapping[str, str], count: int) -> None:
    """Assign the GPU of a place to this trainer, unless the environment already names one.

    `fleet.init` reads this trainer's GPU from the environment, to decide whether NCCL can carry its tensors.

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
    """Check that the startup program has run, if there are other trainers.

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
