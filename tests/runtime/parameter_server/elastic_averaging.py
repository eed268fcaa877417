"""A training mode that the package does not know: elastic averaging (Zhang et al. 2015, arXiv:1412.6651).

Trainers step by themselves. Every `period` steps a trainer sends its parameters; the servers' centre moves
towards them by a share `alpha` of the distance, and the trainer moves towards the centre by as much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fleet.parameter_server.modes import (
    ImmediateServer,
    Mode,
    ServerMode,
    Session,
    Target,
    TrainerMode,
    Update,
)
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of
from fleet.plan import DistributedMode, PlannedBlock


@dataclass(frozen=True)
class ElasticAveraging(Mode):
    """The mode; all a script hands over is ``DistributedStrategy(mode=ElasticAveraging(...))``."""

    period: int
    alpha: float

    name: ClassVar[str] = "elastic-averaging"
    programs: ClassVar[DistributedMode] = DistributedMode.GEO
    steps_locally: ClassVar[bool] = True

    def agreement(self) -> Mapping[str, str]:
        """Return what all processes must have alike."""
        return {"period": str(self.period), "alpha": str(self.alpha)}

    def rule(self, target: Target, update: Update) -> None:
        """Move a block's centre towards a trainer's parameters; the answer is where it then is."""
        target.value.add_(update.gradient - target.value, alpha=self.alpha)

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half."""
        return ImmediateServer(shard, num_trainers)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return Elastic(session, self.period, self.alpha)


class Elastic(TrainerMode):
    """Sends the parameters now and then, and moves them towards the answer."""

    def __init__(self, session: Session, period: int, alpha: float) -> None:
        self._session = session
        self._period = period
        self._alpha = alpha
        self._sent = Arena(
            {
                name: Extent(parameter.dtype, tuple(parameter.shape))
                for name, parameter in session.store.parameters.items()
            }
        )

    @torch.no_grad()
    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """Exchange every so many steps."""
        session = self._session
        session.advance()
        if session.step % self._period:
            return
        payloads: dict[int, memoryview] = {}
        for name, parameter in session.store.parameters.items():
            self._sent[name].copy_(parameter.detach())
        for block in session.plan.blocks:
            whole = bytes_of(self._sent[block.param])
            size = self._sent[block.param].element_size()
            payloads[block.id] = whole[block.begin * size : block.end * size]
        session.expect_values()
        session.send_step(session.step - 1, (), payloads)
        session.wait_for_values()
        for name, parameter in session.store.parameters.items():
            # The answer is the centre after it moved: x - c is what is left of the distance.
            distance = (parameter.detach() - session.store.landed(name)) / (1.0 - self._alpha)
            parameter.sub_(distance, alpha=self._alpha)

    def stop(self) -> None:
        """End with the centre, which is what was trained."""
        self._session.request_values()
        self._session.wait_for_values()
        self._session.adopt_values()
