"""Collective training by an executor: the script's optimizer averages, as in a loop of one's own."""

import weakref

from torch.optim import Optimizer

from fleet.collective import Fleet, fleet
from fleet.errors import ConfigurationError
from fleet.parameter_server.sessions import source_of
from fleet.program import Program
from fleet.role_maker import UserDefinedCollectiveRoleMaker
from fleet.strategy import DistributedStrategy
from fleet.transpiler import DistributeTranspilerConfig

__all__ = ["check_started", "start"]

_started: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def start(program: Program) -> Fleet:
    """Meet the other trainers as a startup program says, and have its optimizer average; once."""
    optimizer = source_of(program).optimizer
    if optimizer not in _started:
        maker = UserDefinedCollectiveRoleMaker(program.attrs["trainer_id"], program.attrs["endpoints"])  # type: ignore[arg-type]
        config = DistributeTranspilerConfig(collective_mode=str(program.attrs["collective_mode"]))
        fleet.init(maker)
        strategy = DistributedStrategy(transpiler=config)
        fleet.distributed_optimizer(optimizer, strategy, source_of(program).module)
        _started.add(optimizer)
        fleet.init_worker()
    return fleet


def check_started(program: Program) -> None:
    """Check that the startup program has run, where others train along.

    Raises
    ------
    ConfigurationError
        It has not.
    """
    if program.attrs.get("trainers", 1) != 1 and source_of(program).optimizer not in _started:
        raise ConfigurationError(
            "this trainer has not met the others; run the startup program first, "
            "fleet.default_startup_program()"
        )
