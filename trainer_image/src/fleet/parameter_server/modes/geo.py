"""GEO mode: trainers update their parameters locally and periodically exchange the changes through servers.

A trainer keeps `old`, the value on which it last agreed with the servers. With N trainers, it sends 1/N of
its changes since then, and adds the sent amount to `old`; the servers add the amount to their value. When the
servers' value `ps` arrives, the trainer adds the other trainers' changes to its parameters: ``w += ps - old;
old = ps``. Local steps continue meanwhile. For a table, the trainer sends only the rows that it has updated
since the last exchange. At the end, trainers wait for each other, so that all of them end with the same
model.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fleet.errors import ConfigurationError, DeadlineExceededError
from fleet.parameter_server.modes.asynchronous import ImmediateServer
from fleet.parameter_server.modes.mode import Mode, ServerMode, Session, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Target, Update
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.process.finite import NO_ROWS

__all__ = ["Geo", "GeoTrainer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Geo(Mode):
    """GEO mode: trainers train locally and exchange changes every `push_nums` steps.

    Attributes
    ----------
    push_nums : int
        The number of steps between two exchanges; fewer if the changed rows would not fit in one exchange.
    """

    push_nums: int = 100

    name: ClassVar[str] = "geo"
    programs: ClassVar[DistributedMode] = DistributedMode.GEO
    steps_locally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.push_nums < 1:
            raise ConfigurationError(f"Geo.push_nums is {self.push_nums}; expected at least 1 step")

    def agreement(self) -> Mapping[str, str]:
        """Return the option that must be equal in all processes: the number of steps between exchanges."""
        return {"push_nums": str(self.push_nums)}

    def rule(self, target: Target, update: Update) -> None:
        """Add a trainer's change to the value."""
        target.value.add_(update.gradient)

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Create the server side of the mode."""
        return ImmediateServer(shard, num_trainers, adds_rows=True)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Create the trainer side of the mode."""
        return GeoTrainer(session, self.push_nums)


class GeoTrainer(TrainerMode):
    """The trainer side of GEO mode.

    Parameters
    ----------
    session : Session
    push_nums : int
        The number of steps between two exchanges.
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
        """The step up to which changes have been sent."""

    def start(self) -> None:
        """Start with the servers' values; log the interval between exchanges."""
        self._pushed_to = self._session.step
        if self._session.plan.trainers > 1:
            _log.info(
                "mode geo: trainers step locally, and exchange changes every %d steps "
                "(config.geo_sgd_need_push_nums); a trainer that makes fewer steps exchanges nothing before "
                "it ends",
                self._push_nums,
            )
        for name, parameter in self._session.store.parameters.items():
            self._agreed[name].copy_(parameter.detach())
        if self._rows is not None:
            self._rows.begin()

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """Count a local step; copy arrived values into the parameters; send changes if an exchange is due."""
        del absent
        session = self._session
        session.advance()
        # Values are adopted at the first step after they have arrived, not only when the next exchange is
        # due.
        if self._in_flight and session.values_arrived and session.rows.settled:
            self._receive()
        early = self._rows is not None and self._rows.must_leave
        if early or session.step % self._push_nums == 0:
            if self._in_flight:  # the previous push still uses the memory of the changes
                self._receive()
            self._push()

    def settle(self) -> None:
        """Send the changes since the last exchange, and add the other trainers' changes to the parameters."""
        if self._in_flight:
            self._receive()
        if self._pushed_to < self._session.step:  # servers would ignore a second push for the same step
            self._push()
            self._receive()

    def stop(self) -> None:
        """Send the last changes, wait for all trainers, and copy the final values into the parameters."""
        self.settle()
        try:
            self._session.wait_for_ends()
        except DeadlineExceededError as error:
            _log.warning("%s: this trainer ends with the current values, which may still change", error)
        self._session.request_values()
        self._session.wait_for_values()
        self._session.adopt_values()
        if self._rows is not None:
            self._rows.end()

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
