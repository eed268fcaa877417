"""The methods that the `fleet` singletons of both kinds of job share."""

import logging
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy.typing as npt
from torch.nn import Module

import fleet as package
from fleet.checkpoint import SavingCalls
from fleet.errors import ConfigurationError, meant
from fleet.fluid.minimization import Optimizer as ProgramOptimizer
from fleet.fluid.originals import MINIMIZE, check_arguments
from fleet.fluid.program import Program
from fleet.loop import LoopCalls
from fleet.metrics import Metrics, check_operation, like, numbers_of
from fleet.process import lifecycle
from fleet.role_maker import File, Role, RoleMaker, share_of_files

__all__ = ["FleetCalls", "ProgramMinimizer", "ProgramOptimizer"]

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fleet.typed import _PublicNames as PublicNames
else:

    class PublicNames:
        """Provides the package's public names as attributes, as in ``fleet.report``."""

        def __getattr__(self, name: str) -> object:
            if name in package.NAMES:
                return getattr(package, name)
            raise package.unknown_name(name, f"fleet has no attribute {name!r}{meant(name, dir(self))}")

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *package.NAMES})


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
_ALONE = {
    False: ("with one parameter server inside it", "launch_ps"),
    True: ("as the only trainer", "launch"),
}


class ProgramMinimizer:
    """A distributed optimizer for programs that are built with layers; see `fleet.fluid.optimizer`.

    Parameters
    ----------
    optimizer : ProgramOptimizer
    transpile : callable
        Turns a program that was minimized into that of this replica.
    """

    def __init__(
        self, optimizer: ProgramOptimizer, transpile: Callable[[Program, Program | None], None]
    ) -> None:
        self._optimizer = optimizer
        self._transpile = transpile

    def minimize(
        self,
        loss: Any,
        startup_program: Program | None = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> Any:
        """Append the backward pass and the updates, and transpile the program in place.

        Parameters
        ----------
        loss, startup_program, parameter_list, no_grad_set
            As for ``minimize`` of the optimizer itself.

        Returns
        -------
        list of Operator, list of (ProgramVariable, ProgramVariable)
            The updates, and the parameters with their gradients in order of creation.

        Raises
        ------
        ConfigurationError, TranspileError
            The program is minimized already, or the job cannot train it.
        """
        if isinstance(loss, list | tuple) and len(loss) == 1:  # Paddle's own method takes a list too
            (loss,) = loss
        if not hasattr(loss, "block"):
            raise ConfigurationError(
                f"minimize: loss is a {type(loss).__name__}; expected the variable that a layer such as "
                "fluid.layers.mean returned, because the optimizer is one of fluid.optimizer"
            )
        made = self._optimizer.minimize(loss, startup_program, parameter_list, no_grad_set)
        self._transpile(loss.block.program, startup_program)
        return made


class FleetCalls(SavingCalls, LoopCalls, PublicNames):
    """The base class of the `fleet` singletons, with the methods that both kinds of job share."""

    def __init__(self) -> None:
        super().__init__()
        self._describe: Callable[..., Any] | None = None

    def all_reduce_worker(
        self, values: Any, output: npt.NDArray[Any] | None = None, mode: str = "sum"
    ) -> Any:
        """Reduce numbers over all trainers that have not completed.

        Parameters
        ----------
        values
            A number, an array or a tensor, of the same shape and type on every trainer. With servers it must
            be small.
        output : numpy.ndarray, optional
            Also receives the result.
        mode : str
            ``sum``, ``min`` or ``max``.

        Returns
        -------
        numpy.ndarray or Tensor
            The same on every trainer.

        Raises
        ------
        ConfigurationError
            Another trainer passes a different shape or type, or the values are not numbers that can be
            reduced.
        DeadlineExceededError
            With servers: a trainer did not call this; the message names it.
        """
        check_operation(mode)
        return like(values, self._all_reduce(numbers_of(values), mode), output)

    @property
    def metrics(self) -> Metrics:
        """A factory of metrics that are computed over the samples of all trainers."""
        return Metrics(self.all_reduce_worker)

    @property
    @abstractmethod
    def _role(self) -> Role | None:
        """The role of this process; None before ``init``."""

    @property
    @abstractmethod
    def main_program(self) -> Program:
        """The program that this replica runs; available after ``minimize``."""

    @property
    def startup_program(self) -> Program:
        """The program that initializes the variables of `main_program`."""
        return self.main_program.startup_program or Program()

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        startup_program: object = None,
        parameter_list: object = None,
        no_grad_set: object = None,
    ) -> Any:
        """Capture the training step as a program, like the distributed optimizer's ``minimize``.

        Parameters
        ----------
        loss_fn : callable or ProgramVariable
            As for `Program.capture`: called as ``loss_fn(model, **feed)``, it returns the loss, a tensor of
            one element, or a dict of tensors that includes ``loss``. With an optimizer of
            `fleet.fluid.optimizer`, the variable of the loss.
        startup_program, parameter_list, no_grad_set : None
            Other arguments of Paddle, which are refused by name unless they are None.

        Raises
        ------
        ConfigurationError
            ``fleet.distributed_optimizer`` was not called, or was called without a model; or an argument is
            refused.
        TranspileError
            The step cannot be captured; the message gives the cause.
        """
        if self._describe is None:
            raise ConfigurationError("fleet.minimize was called before fleet.distributed_optimizer")
        return self._describe(loss_fn, startup_program, parameter_list, no_grad_set)

    def _minimizes(
        self, optimizer: ProgramOptimizer, transpile: Callable[[Program, Program | None], None]
    ) -> ProgramMinimizer:
        """Return a minimizer for a program built with layers; `fleet.minimize` uses the first one."""
        minimizer = ProgramMinimizer(optimizer, transpile)
        self._describe = self._describe or minimizer.minimize
        return minimizer

    @abstractmethod
    def _all_reduce(self, numbers: npt.NDArray[Any], operation: str) -> npt.NDArray[Any]:
        """Return numbers reduced over the trainers, in the same shape and dtype."""

    def _describes(
        self, model: Module | None, capture: Callable[[Module, Callable[..., Any]], None]
    ) -> Callable[..., None]:
        """Return the ``minimize`` method of an optimizer; `fleet.minimize` uses the first one."""

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
                    "minimize() runs the model, so pass it, as in fleet.distributed_optimizer(optimizer, "
                    "model=model)"
                )
            capture(model, loss_fn)

        self._describe = self._describe or minimize
        return minimize

    def is_worker(self) -> bool:
        """Return whether this process is a trainer; True for every process of a collective job.

        Returns
        -------
        bool
            True on a trainer.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().is_worker

    def is_first_worker(self) -> bool:
        """Return whether this process is trainer 0, which does work that only one trainer may do.

        Returns
        -------
        bool
            True on trainer 0.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().is_first_worker

    def worker_index(self) -> int:
        """Return this trainer's index; in a collective job, its rank.

        Returns
        -------
        int
            Counted from 0.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().index

    def worker_num(self) -> int:
        """Return the number of trainers.

        Returns
        -------
        int
            At least 1.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().worker_num

    @overload
    def worker_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def worker_endpoints(self, to_string: Literal[True]) -> str: ...
    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the host:port of every trainer, as a list or as comma-separated text.

        With parameter servers the result is empty, because trainers do not listen.

        Parameters
        ----------
        to_string : bool
            Return a comma-separated string instead of a list.

        Returns
        -------
        list of str, or str
            As host:port.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return _listed(self._started_role().worker_endpoints, to_string)

    def server_num(self) -> int:
        """Return the number of parameter servers; 0 in a collective job.

        Returns
        -------
        int
            At least 1 in a parameter-server job.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().server_num

    @overload
    def server_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def server_endpoints(self, to_string: Literal[True]) -> str: ...
    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the host:port of every parameter server, as a list or as comma-separated text.

        Parameters
        ----------
        to_string : bool
            Return a comma-separated string instead of a list.

        Returns
        -------
        list of str, or str
            As host:port.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return _listed(self._started_role().server_endpoints, to_string)

    def split_files(self, files: Sequence[File]) -> list[File]:
        """Return this trainer's contiguous share of a list of files.

        Parameters
        ----------
        files : sequence of str or path
            The same files in the same order on every trainer.

        Returns
        -------
        list of str or path
            If the files do not divide evenly, the trainers with the lowest indexes get one more. Empty if
            there are fewer files than trainers and this trainer gets none.

        Raises
        ------
        ConfigurationError
            `files` is not a list of names, this process is a parameter server, or ``fleet.init`` was not
            called.
        """
        role = self._started_role()
        if not role.is_worker:
            raise ConfigurationError(
                "fleet.split_files: a parameter server reads no files; expected a trainer"
            )
        return share_of_files(files, role.index, role.worker_num)

    def _find_role(self, role_maker: RoleMaker, *, collective: bool) -> Role:
        """Return the role for ``init``; raise ConfigurationError if it belongs to the other kind of job.

        From here on, a user's mistake ends the process as it would end a replica, although the role is not
        known yet.
        """
        lifecycle.start(None)
        if self._role is not None:
            raise ConfigurationError("fleet.init was called a second time; expected once per process")
        role = role_maker.generate_role()
        if role.is_collective != collective:
            raise ConfigurationError(_OTHER_FLEET[collective])
        if role.is_alone:
            _log.info(
                "this process belongs to no job, so it trains alone, %s; to start several processes: "
                "fleetjob run -f fleetjob.yaml, or python -m fleet.%s SCRIPT",
                *_ALONE[collective],
            )
            return _on_free_port(role)
        return role

    def _checkpoint_root(self) -> str | None:
        return self._started_role().checkpoint_dir

    def _started_role(self) -> Role:
        if self._role is None:
            raise ConfigurationError("fleet.init was not called; call it before any other call of fleet")
        return self._role


def _on_free_port(role: Role) -> Role:
    """Return the role with a free port of this host, on which other processes may train alone, too."""
    with socket.create_server((role.current_host, 0)) as listener:
        endpoint = f"{role.current_host}:{listener.getsockname()[1]}"
    if role.is_collective:
        return replace(role, worker_endpoints=(endpoint,), current_endpoint=endpoint)
    return replace(role, server_endpoints=(endpoint,))


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
