"""The calls of `fleet` that both kinds of job answer alike, from the role and the captured program."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy.typing as npt
from torch.nn import Module

import fleet as package
from fleet.checkpoint import SavingCalls
from fleet.errors import ConfigurationError
from fleet.facade.numbers import check_operation, like, numbers_of
from fleet.loop import LoopCalls
from fleet.program import Program
from fleet.role_maker import Role, RoleMaker, share_of_files

__all__ = ["FleetCalls"]

_OTHER_FLEET = {
    False: (
        "fleet.parameter_server was given the role of a collective job; expected "
        "PaddleCloudRoleMaker() without is_collective, or the fleet of fleet.collective"
    ),
    True: (
        "fleet.collective was given the role of a job with parameter servers; expected "
        "PaddleCloudRoleMaker(is_collective=True), or the fleet of fleet.parameter_server"
    ),
}


class FleetCalls(SavingCalls, LoopCalls):
    """The place of this process in a job. The heir trains, and says what differs between the two kinds."""

    def __init__(self) -> None:
        self._role: Role | None = None
        self._describe: Callable[[Callable[..., Any]], None] | None = None

    def __getattr__(self, name: str) -> Any:
        """Resolve what is no method here as a public name of the package, as in ``fleet.report``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(package, name)

    def is_worker(self) -> bool:
        """Whether this process trains; in a collective job every process does."""
        return self._started_role().is_worker

    def is_first_worker(self) -> bool:
        """Whether this process is trainer 0, which acts for all where one must."""
        return self._started_role().is_first_worker

    def worker_index(self) -> int:
        """Return this trainer's index; in a collective job its rank."""
        return self._started_role().index

    def worker_num(self) -> int:
        """Return the number of trainers."""
        return self._started_role().worker_num

    @overload
    def worker_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def worker_endpoints(self, to_string: Literal[True]) -> str: ...
    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return every trainer's host:port, as a list or comma separated.

        Beside parameter servers there is none, as trainers do not listen there.
        """
        return _listed(self._started_role().worker_endpoints, to_string)

    def server_num(self) -> int:
        """Return the number of parameter servers: 0 in a collective job."""
        return self._started_role().server_num

    @overload
    def server_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def server_endpoints(self, to_string: Literal[True]) -> str: ...
    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return every server's host:port, as a list or comma separated: none in a collective job."""
        return _listed(self._started_role().server_endpoints, to_string)

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Return this trainer's share: contiguous blocks, what remains goes to the lowest indexes."""
        role = self._started_role()
        if not role.is_worker:
            raise ConfigurationError(
                "fleet.split_files: a parameter server reads no files; expected a trainer"
            )
        return share_of_files(files, role.index, role.worker_num)

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
    @abstractmethod
    def main_program(self) -> Program:
        """What this replica runs at each step, after ``minimize``; of a server, what it serves."""

    @property
    def startup_program(self) -> Program:
        """What prepares `main_program`."""
        return self.main_program.startup_program or Program()

    def minimize(self, loss_fn: Callable[..., Any]) -> None:
        """Describe the training step as a program; the same as the distributed optimizer's ``minimize``."""
        if self._describe is None:
            raise ConfigurationError("fleet.minimize was called before fleet.distributed_optimizer")
        self._describe(loss_fn)

    @abstractmethod
    def _all_reduce(self, numbers: npt.NDArray[Any], operation: str) -> npt.NDArray[Any]:
        """Return numbers combined over the trainers, in their own shape and type."""

    def _find_role(self, role_maker: RoleMaker, *, collective: bool) -> Role:
        """Return the role that ``init`` is to take; ConfigurationError if it is the other fleet's."""
        if self._role is not None:
            raise ConfigurationError("fleet.init was called a second time; expected once per process")
        role = role_maker.generate_role()
        if role.is_collective != collective:
            raise ConfigurationError(_OTHER_FLEET[collective])
        return role

    def _describes(
        self, model: Module | None, capture: Callable[[Module, Callable[..., Any]], None]
    ) -> Callable[[Callable[..., Any]], None]:
        """Return the ``minimize`` of an optimizer; that of the first is `fleet.minimize` too."""

        def minimize(loss_fn: Callable[..., Any]) -> None:
            if model is None:
                raise ConfigurationError(
                    "minimize() runs the model: give it, as in "
                    "fleet.distributed_optimizer(optimizer, model=model)"
                )
            capture(model, loss_fn)

        self._describe = self._describe or minimize
        return minimize

    def _checkpoint_root(self) -> str | None:
        return self._started_role().checkpoint_dir

    def _started_role(self) -> Role:
        if self._role is None:
            raise ConfigurationError("fleet.init was not called; expected it before anything else of fleet")
        return self._role


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
