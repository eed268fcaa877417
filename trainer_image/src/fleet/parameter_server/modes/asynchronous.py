"""Async: each gradient is applied when it comes, and its trainer goes on with the value after it.

As in the original a gradient is not divided by the number of trainers: N trainers make N times the steps of
one. Gradients may be stale, as others have stepped since their trainer got its values; DC-ASGD corrects them
to first order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.immediate import ImmediateServer
from fleet.parameter_server.modes.immediate_tables import ImmediateTables
from fleet.parameter_server.modes.interface import Mode, ServerMode, Session, TableServer, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Target, Update
from fleet.parameter_server.table_store import TableStore
from fleet.plan.config import DistributedMode
from fleet.update import compensate_delay

__all__ = ["Async"]


@dataclass(frozen=True)
class Async(Mode):
    """The async mode.

    Attributes
    ----------
    dc_asgd : bool
        Compensate gradients for their delay.
    """

    dc_asgd: bool = False

    name: ClassVar[str] = "async"
    programs: ClassVar[DistributedMode] = DistributedMode.ASYNC
    elastic: ClassVar[bool] = True

    def agreement(self) -> Mapping[str, str]:
        """Return whether delay is compensated."""
        return {"dc_asgd": str(self.dc_asgd)}

    def rule(self, target: Target, update: Update) -> None:
        """Step a block by one gradient alone."""
        gradient = update.gradient
        if update.seen is not None:
            gradient = compensate_delay(gradient, target.value, update.seen)
        target.step(gradient)

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half."""
        return ImmediateServer(shard, num_trainers, keeps_seen=self.dc_asgd)

    def make_tables(self, store: TableStore, num_trainers: int) -> TableServer:
        """Build what steps tables by each gradient that comes."""
        return ImmediateTables(store, num_trainers)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return AnsweredTrainer(session)
