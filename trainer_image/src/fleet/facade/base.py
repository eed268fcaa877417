"""The calls of `fleet` that both kinds of job answer alike, once the heir has said what it trains with."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from torch.nn import Module

import fleet as package
from fleet.checkpoint import SavingCalls
from fleet.errors import ConfigurationError, meant
from fleet.facade.role import RoleCalls
from fleet.fluid import Program
from fleet.fluid.originals import MINIMIZE, check_arguments
from fleet.loop import LoopCalls
from fleet.metrics import Metrics, check_operation, like, numbers_of

__all__ = ["FleetCalls"]

if TYPE_CHECKING:
    from fleet.typed import _PublicNames as PublicNames
else:

    class PublicNames:
        """The public names of the package as attributes, as in ``fleet.report``."""

        def __getattr__(self, name: str) -> object:
            if name in package.NAMES:
                return getattr(package, name)
            raise package.unknown_name(name, f"fleet has no attribute {name!r}{meant(name, dir(self))}")

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *package.NAMES})


class FleetCalls(RoleCalls, SavingCalls, LoopCalls, PublicNames):
    """The way to train in a job. The heir says what differs between the two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self._describe: Callable[..., None] | None = None

    def all_reduce_worker(
        self, values: Any, output: npt.NDArray[Any] | None = None, mode: str = "sum"
    ) -> Any:
        """Combine numbers over all trainers; beside servers, over those that have not completed, in order.

        Parameters
        ----------
        values
            A number, an array or a tensor; of the same shape and type on every trainer. Beside servers small.
        output : numpy.ndarray, optional
            Receives the result as well.
        mode : str
            ``sum``, ``min`` or ``max``.

        Returns
        -------
        numpy.ndarray or Tensor
            The same on every trainer.

        Raises
        ------
        ConfigurationError
            Another trainer gives something else, or these are no numbers that can be combined.
        DeadlineExceededError
            Beside servers: a trainer did not call this; the message names it.
        """
        check_operation(mode)
        return like(values, self._all_reduce(numbers_of(values), mode), output)

    @property
    def metrics(self) -> Metrics:
        """Metrics over the samples of all trainers; each trainer counts its own and calls ``compute``."""
        return Metrics(self.all_reduce_worker)

    @property
    @abstractmethod
    def main_program(self) -> Program:
        """What this replica runs at each step, after ``minimize``; of a server, what it serves."""

    @property
    def startup_program(self) -> Program:
        """What prepares `main_program`."""
        return self.main_program.startup_program or Program()

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        startup_program: object = None,
        parameter_list: object = None,
        no_grad_set: object = None,
    ) -> None:
        """Describe the training step as a program; the same as the distributed optimizer's ``minimize``.

        Parameters
        ----------
        loss_fn : callable
            As of `Program.capture`: called as ``loss_fn(model, **feed)``, it returns the loss, a tensor of
            one element, or a dict of tensors with ``loss`` among them.
        startup_program, parameter_list, no_grad_set : None
            The original's further arguments, which are refused by name unless they are None.

        Raises
        ------
        ConfigurationError
            ``fleet.distributed_optimizer`` was not called, or was given no model; or an argument is refused.
        TranspileError
            The step cannot be captured; the message says what.
        """
        if self._describe is None:
            raise ConfigurationError("fleet.minimize was called before fleet.distributed_optimizer")
        self._describe(loss_fn, startup_program, parameter_list, no_grad_set)

    @abstractmethod
    def _all_reduce(self, numbers: npt.NDArray[Any], operation: str) -> npt.NDArray[Any]:
        """Return numbers combined over the trainers, in their own shape and type."""

    def _describes(
        self, model: Module | None, capture: Callable[[Module, Callable[..., Any]], None]
    ) -> Callable[..., None]:
        """Return the ``minimize`` of an optimizer; that of the first is `fleet.minimize` too."""

        def minimize(
            loss_fn: Callable[..., Any],
            startup_program: object = None,
            parameter_list: object = None,
            no_grad_set: object = None,
        ) -> None:
            originals = {
                "startup_program": startup_program,
                "parameter_list": parameter_list,
                "no_grad_set": no_grad_set,
            }
            check_arguments("minimize", originals, MINIMIZE)
            if model is None:
                raise ConfigurationError(
                    "minimize() runs the model: give it, as in "
                    "fleet.distributed_optimizer(optimizer, model=model)"
                )
            capture(model, loss_fn)

        self._describe = self._describe or minimize
        return minimize
