"""A trainer that steps its parameters itself: nothing is watched, nothing can be changed too late."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fleet.parameter_server.modes import TrainerMode
from fleet.parameter_server.trainer.gradients import OwnStep, hyper_parameters_of
from fleet.parameter_server.trainer.local_tables import LocalTables
from fleet.parameter_server.trainer.scaling import Scaling
from fleet.process.finite import NO_ROWS, FiniteCheck
from fleet.without_dynamo import step_directly

__all__ = ["LocalSteps"]


class LocalSteps:
    """Stands where a `GradientFlow` does, for modes in which the user's own optimizer steps.

    Parameters
    ----------
    optimizer : Optimizer
        The user's.
    mode : TrainerMode
        What happens after each step.
    finite : FiniteCheck
        Looks at the gradients of rows.
    rows : LocalTables, optional
        The tables, if there are some: their rules step rows, in the place of the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: TrainerMode,
        finite: FiniteCheck,
        rows: LocalTables | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._mode = mode
        self._finite = finite
        self._rows = rows
        self.own_step = OwnStep(optimizer)

    def attach(self) -> None:
        """Refuse steps that nobody would hear of; the backward pass is the trainer's own business."""
        self.own_step.attach()

    def detach(self) -> None:
        """Let the optimizer step by itself again."""
        self.own_step.detach()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes accumulate, as they do anyway."""
        yield

    def step(self, scaling: Scaling | None = None) -> None:
        """Step by the gradients that are there, and exchange what has changed when it is time to.

        Parameters
        ----------
        scaling : Scaling, optional
            As of `GradientFlow.step`.

        Raises
        ------
        FleetError
            A gradient of a row is not finite, and the strategy says to stop; or the servers failed.
        """
        if scaling is not None:
            scaling.undo(self._gradients())
        of_rows = self._rows.gathered.sums() if self._rows is not None else NO_ROWS
        if scaling is None:
            steps = self._rows is None or self._finite.lets_step({}, of_rows)
        else:
            steps = not scaling.found_inf
        if steps:
            without = _without_gradients(self._rows.weights if self._rows is not None else ())
            with without, self.own_step.allowed():
                step_directly(self._optimizer)  # its hooks are called around the whole of this step
            if self._rows is not None:
                self._rows.step(of_rows, hyper_parameters_of(self._optimizer))
        if self._rows is not None:
            self._rows.gathered.forget()
        self._mode.finish(())

    def check_nothing_in_flight(self, what: str) -> None:
        """Do nothing: nothing ever is."""

    def _gradients(self) -> list[Tensor]:
        """Return all gradients, each once."""
        groups = self._optimizer.param_groups
        grads = [each.grad for group in groups for each in group["params"] if each.grad is not None]
        grads += self._rows.gathered.leaves() if self._rows is not None else []
        return list({id(grad): grad for grad in grads}.values())


@contextlib.contextmanager
def _without_gradients(weights: Iterable[Parameter]) -> Iterator[None]:
    """Let an optimizer pass over weights; their gradients stay."""
    kept = [(weight, weight.grad) for weight in weights]
    for weight, _ in kept:
        weight.grad = None
    try:
        yield
    finally:
        for weight, grad in kept:
            weight.grad = grad
