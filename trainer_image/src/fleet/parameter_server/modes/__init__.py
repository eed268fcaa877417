"""Training modes, which synchronize trainers and servers; each module implements one mode.

`Mode` is the public interface: subclass it, and pass an instance as ``DistributedStrategy(mode=…)``. Other
modes can be built on `ImmediateServer` and `AnsweredTrainer`.
"""

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes.asynchronous import Async, ImmediateServer
from fleet.parameter_server.modes.geo import Geo
from fleet.parameter_server.modes.half_async import HalfAsync
from fleet.parameter_server.modes.mode import (
    Answer,
    AnsweredTrainer,
    CrossStepTrainer,
    Missing,
    Mode,
    ServerMode,
    Session,
    TrainerMode,
)
from fleet.parameter_server.modes.sync import Sync
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.shard import NormPart
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
    "NormPart",
    "Origin",
    "ServerMode",
    "Session",
    "Sync",
    "Target",
    "TrainerMode",
    "Update",
    "mode_of_server",
    "mode_of_trainer",
]


def mode_of_server(plan: ServerPlan) -> Mode:
    """Return the training mode in a server's plan.

    Raises
    ------
    ConfigurationError
        The plan has a user-defined mode that is not an instance of `Mode`.
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
    """Return the training mode in a trainer's plan.

    Raises
    ------
    ConfigurationError
        The plan has a user-defined mode that is not an instance of `Mode`.
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
