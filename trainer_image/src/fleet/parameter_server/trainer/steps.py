"""What makes a trainer's steps: its half of the mode, and what brings that the gradients."""

from collections.abc import Mapping

from torch.nn import Parameter

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes import Mode, TrainerMode
from fleet.parameter_server.trainer.gradients import GradientFlow
from fleet.parameter_server.trainer.local_steps import LocalSteps
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.trainer.scaling import Scaling
from fleet.parameter_server.trainer.session import Session
from fleet.plan import Source
from fleet.process.finite import FiniteCheck

__all__ = ["Steps"]


class Steps:
    """Makes steps until it is stopped; can begin anew with other values.

    Parameters
    ----------
    kind : Mode
    session : Session
        What the half asks the servers through.
    source : Source
        The module's parameters and the optimizer.
    overlap : bool or None
        Whether gradients leave during the backward pass; as of `GradientFlow`.
    cross_step : bool
        Whether values are awaited layer by layer in the next forward pass.
    finite : FiniteCheck
        Looks at the gradients.
    rows : TrainerRows
        The tables that live on the servers.

    Raises
    ------
    ConfigurationError
        `cross_step` cannot be honoured: the source has no module, or the mode does not wait for each step.
    """

    def __init__(
        self,
        kind: Mode,
        session: Session,
        source: Source,
        *,
        overlap: bool | None,
        cross_step: bool,
        finite: FiniteCheck,
        rows: TrainerRows,
    ) -> None:
        self.crosses = cross_step
        """Whether values are awaited in the next forward pass."""
        self._kind = kind
        self._session = session
        self._source = source
        self._overlap = overlap
        self._finite = finite
        self._rows = rows
        self.mode, self.flow = self._make()

    @property
    def names(self) -> Mapping[Parameter, str]:
        """The parameters' names in the program."""
        return {parameter: name for name, parameter in self._source.parameters.items()}

    def start(self) -> None:
        """Begin, with the servers' values as the parameters."""
        self.mode.start()
        self.flow.attach()

    def step(self, scaling: Scaling | None) -> None:
        """Make one step; see `GradientFlow.step`."""
        self.flow.step(scaling)

    def restart(self) -> None:
        """Begin anew, with other values."""
        self.flow.detach()
        self.mode.close()
        self.mode, self.flow = self._make()
        self.start()

    def forget_rows(self) -> None:
        """Drop the gradients of rows that have come since the last step."""
        self._rows.gathered.forget()

    def settle(self) -> None:
        """Let the servers have all of the steps made so far."""
        self.mode.settle()
        self._rows.wait()
        self._rows.adopt()

    def check_settled(self, call: str) -> None:
        """Check that a step's values are here, and none are about to come; FleetError otherwise."""
        self.flow.check_nothing_in_flight(f"{call} was called")
        self.mode.check_settled(call)

    def stop(self) -> None:
        """Let nothing be lost: send what is left, and take the last values."""
        self.flow.check_nothing_in_flight("the training was ended")
        self.flow.detach()
        self.mode.stop()
        if isinstance(self.flow, GradientFlow):
            self.flow.check_earlier()

    def _make(self) -> tuple[TrainerMode, GradientFlow | LocalSteps]:
        half, source = self._kind.make_trainer(self._session), self._source
        if self.crosses:
            half = self._across_steps(half)
        if self._kind.steps_locally:
            return half, LocalSteps(source.optimizer, half, self._finite, self._session.local_rows)
        flow = GradientFlow(
            self._session.plan,
            source.parameters,
            source.optimizer,
            half,
            overlap=self._overlap,
            outlasting=self.crosses,
            finite=self._finite,
            rows=self._rows,
        )
        return half, flow

    def _across_steps(self, half: TrainerMode) -> TrainerMode:
        """Return what waits in the next forward pass in place of a half that waits in each step."""
        if self._source.module is None:
            raise ConfigurationError(
                "strategy.cross_step is True, and the layers that are to wait are not known: give the model, "
                "as in fleet.distributed_optimizer(optimizer, strategy, model=model)"
            )
        crossing = half.across_steps(self._source.module)
        if crossing is None:
            raise ConfigurationError(
                f"strategy.cross_step is True, and in the mode {self._kind.name!r} optimizer.step() does not "
                "wait for its own values; use cross_step = False, or the mode 'sync' or 'async'"
            )
        return crossing
