"""GEO: trainers step by themselves, and every so many steps exchange what has changed.

A trainer keeps the value it agreed on with the servers last, `old`. It sends the N-th part of what it has
changed since, and counts it as agreed; the servers add it. When their value `ps` arrives, what the others
have changed is added to the parameters: ``w += ps - old; old = ps``. Local steps go on in between. Of a
table only those rows travel that the trainer has stepped since the last time. At the
end they wait for each other, so that all of them end with one and the same model.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fleet.errors import ConfigurationError, DeadlineExceededError
from fleet.parameter_server.modes.immediate import ImmediateServer
from fleet.parameter_server.modes.immediate_tables import ImmediateTables
from fleet.parameter_server.modes.interface import Mode, ServerMode, Session, TableServer, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Target, Update
from fleet.parameter_server.table_store import TableStore
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.process.finite import NO_ROWS
from fleet.wire import HyperParameters

__all__ = ["Geo", "GeoTrainer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Geo(Mode):
    """The GEO mode.

    Attributes
    ----------
    push_nums : int
        After how many steps a trainer sends what has changed; earlier where rows would be too many.
    """

    push_nums: int = 100

    name: ClassVar[str] = "geo"
    programs: ClassVar[DistributedMode] = DistributedMode.GEO
    steps_locally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.push_nums < 1:
            raise ConfigurationError(f"Geo.push_nums is {self.push_nums}; expected at least 1 step")

    def agreement(self) -> Mapping[str, str]:
        """Return how often trainers send."""
        return {"push_nums": str(self.push_nums)}

    def rule(self, target: Target, update: Update) -> None:
        """Add what a trainer has changed."""
        target.value.add_(update.gradient)

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half."""
        return ImmediateServer(shard, num_trainers)

    def make_tables(self, store: TableStore, num_trainers: int) -> TableServer:
        """Build what adds to rows what trainers have changed."""
        return ImmediateTables(store, num_trainers, adds=True)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return GeoTrainer(session, self.push_nums)


class GeoTrainer:
    """The trainer's half of GEO; see `TrainerMode`.

    Parameters
    ----------
    session : Session
    push_nums : int
        After how many steps what has changed is sent.
    """

    def __init__(self, session: Session, push_nums: int) -> None:
        self._session = session
        self._push_nums = push_nums
        self._rows = session.local_rows
        parameters = session.store.parameters
        extents = {name: Extent(value.dtype, tuple(value.shape)) for name, value in parameters.items()}
        self._agreed = Arena(extents)
        self._delta = Arena(extents)
        self._in_flight = False
        self._pushed_to = 0
        """The step up to which what has changed was sent."""

    def start(self) -> None:
        """Agree on the values that the servers gave, and say how often trainers hear of each other."""
        self._pushed_to = self._session.step
        if self._session.plan.trainers > 1:
            _log.info(
                "mode geo: trainers step by themselves, and exchange what they have changed every %d steps "
                "(config.geo_sgd_need_push_nums); one that makes fewer exchanges nothing before its end",
                self._push_nums,
            )
        for name, parameter in self._session.store.parameters.items():
            self._agreed[name].copy_(parameter.detach())
        if self._rows is not None:
            self._rows.begin()

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Do nothing: the trainer's own optimizer has the hyper-parameters."""

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Do nothing: gradients stay here."""

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """Count a local step; take what has arrived, and send what has changed when it is time to."""
        del absent
        session = self._session
        session.advance()
        if self._in_flight and session.values_arrived and session.rows.settled:
            self._receive()
        early = self._rows is not None and self._rows.must_leave
        if early or session.step % self._push_nums == 0:
            if self._in_flight:  # the memory of what was sent is still in use
                self._receive()
            self._push()

    def settle(self) -> None:
        """Send what has changed since the last time, and take what the others changed."""
        if self._in_flight:
            self._receive()
        if self._pushed_to < self._session.step:  # a step sent twice is taken once
            self._push()
            self._receive()

    def stop(self) -> None:
        """Send what has changed since the last time, and end with the values that hold everybody's."""
        self.settle()
        try:
            self._session.wait_for_ends()
        except DeadlineExceededError as error:
            _log.warning("%s: this trainer ends with the present values, which may still change", error)
        self._session.request_values()
        self._session.wait_for_values()
        self._session.adopt_values()
        if self._rows is not None:
            self._rows.end()

    def close(self) -> None:
        """Do nothing: there is no thread."""

    @torch.no_grad()
    def _push(self) -> None:
        session, plan = self._session, self._session.plan
        for name, parameter in session.store.parameters.items():
            delta, agreed = self._delta[name], self._agreed[name]
            torch.sub(parameter.detach().to(agreed.device), agreed, out=delta)
            delta.div_(plan.trainers)
            agreed.add_(delta)
        session.expect_values()
        payloads: dict[int, memoryview] = {}
        for block in plan.blocks:
            size = self._delta[block.param].element_size()
            whole = bytes_of(self._delta[block.param])
            payloads[block.id] = whole[block.begin * size : block.end * size]
        leaving = NO_ROWS if self._rows is None else self._rows.leaving()
        session.send_step(session.step - 1, (), payloads, leaving)
        self._in_flight, self._pushed_to = True, session.step

    @torch.no_grad()
    def _receive(self) -> None:
        session = self._session
        session.wait_for_values()
        for name, parameter in session.store.parameters.items():
            landed, agreed = session.store.landed(name), self._agreed[name]
            parameter.add_((landed - agreed).to(parameter.device))
            agreed.copy_(landed)
        if self._rows is not None:
            session.rows.wait()
            self._rows.arrived()
        self._in_flight = False
