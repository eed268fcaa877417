"""How trainers and servers keep step: one file per mode, all behind the interface of `interface`.

`Mode` is the public interface: subclass it and hand an instance over as ``DistributedStrategy(mode=…)``.
`ImmediateServer` and `AnsweredTrainer` are halves to build on.
"""

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.asynchronous import Async
from fleet.parameter_server.modes.cross_step import CrossStepTrainer
from fleet.parameter_server.modes.geo import Geo
from fleet.parameter_server.modes.half_async import HalfAsync
from fleet.parameter_server.modes.immediate import ImmediateServer
from fleet.parameter_server.modes.interface import (
    Answer,
    Missing,
    Mode,
    NormExchange,
    QueuesRows,
    ResumesEach,
    ServerMode,
    Session,
    Settling,
    TrainerMode,
    Work,
)
from fleet.parameter_server.modes.norms import NormPart
from fleet.parameter_server.modes.sync import Sync
from fleet.parameter_server.modes.tabled import TabledServer, with_tables
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.store import Origin, Target, Update
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.plan.config import DistributedMode
from fleet.plan.job import ServerPlan, TrainerPlan

__all__ = [
    "Answer",
    "AnsweredTrainer",
    "Async",
    "CrossStepTrainer",
    "Geo",
    "HalfAsync",
    "ImmediateServer",
    "LazyBytes",
    "Missing",
    "Mode",
    "NormExchange",
    "NormPart",
    "Origin",
    "QueuesRows",
    "ResumesEach",
    "ServerMode",
    "Session",
    "Settling",
    "Sync",
    "TabledServer",
    "Target",
    "TrainerMode",
    "Update",
    "Work",
    "mode_of_server",
    "mode_of_trainer",
    "with_tables",
]


def mode_of_server(plan: ServerPlan) -> Mode:
    """Return the mode in which a server's plan is to be followed.

    Raises
    ------
    ConfigurationError
        The plan has a mode of the user's own that is no `Mode`.
    """
    if plan.custom is not None:
        return _checked(plan.custom)
    match plan.mode:
        case DistributedMode.SYNC:
            return Sync()
        case DistributedMode.ASYNC:
            return Async(dc_asgd=plan.dc_asgd)
        case DistributedMode.HALF_ASYNC:
            return HalfAsync()
        case DistributedMode.GEO:
            return Geo()


def mode_of_trainer(plan: TrainerPlan, settings: Settings) -> Mode:
    """Return the mode in which a trainer's plan is to be followed.

    Raises
    ------
    ConfigurationError
        The plan has a mode of the user's own that is no `Mode`.
    """
    if plan.custom is not None:
        return _checked(plan.custom)
    match plan.mode:
        case DistributedMode.SYNC:
            return Sync()
        case DistributedMode.ASYNC:
            return Async()
        case DistributedMode.HALF_ASYNC:
            return HalfAsync(settings.send_queue_size, settings.max_merge_var_num)
        case DistributedMode.GEO:
            return Geo(plan.push_nums)


def _checked(mode: object) -> Mode:
    if not isinstance(mode, Mode):
        raise ConfigurationError(
            f"the training mode {mode!r} is a {type(mode).__name__}; expected an instance of a subclass of "
            "fleet.parameter_server.modes.Mode"
        )
    return mode
