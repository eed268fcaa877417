"""The original's executor of collective training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from fleet.errors import ConfigurationError
from fleet.executor.executor import Executor, check_place
from fleet.executor.place import CPUPlace, CUDAPlace
from fleet.program import Program, Variable, default_main_program

__all__ = ["ParallelExecutor"]


class ParallelExecutor:
    """Makes the steps of one trainer of several; see `DistributeTranspiler`, mode ``nccl2``.

    Parameters
    ----------
    use_cuda : bool
        Compute on this process's current GPU.
    loss_name : str, optional
        As in the original; a variable of the program.
    main_program : Program, optional
        ``fleet.default_main_program()`` otherwise.
    num_trainers, trainer_id : int
        As they were given to ``transpile``.

    Raises
    ------
    ConfigurationError
        They differ from what the program was transpiled for, or it has no such variable; or there is no GPU.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        *,
        num_trainers: int = 1,
        trainer_id: int = 0,
    ) -> None:
        self._program = main_program if main_program is not None else default_main_program()
        if loss_name is not None and not self._program.global_block().has_var(loss_name):
            raise ConfigurationError(
                f"ParallelExecutor: loss_name is {loss_name!r}; expected a variable of the program"
            )
        transpiled = (self._program.attrs.get("trainers", 1), self._program.attrs.get("trainer_id", 0))
        if transpiled != (num_trainers, trainer_id):
            raise ConfigurationError(
                f"ParallelExecutor: num_trainers is {num_trainers} and trainer_id {trainer_id}, and the "
                f"program was transpiled for {transpiled[0]} and {transpiled[1]}; expected the same, by a "
                "DistributeTranspiler whose config.mode is 'nccl2'"
            )
        own = torch.cuda.current_device() if torch.cuda.is_available() else 0
        place = CUDAPlace(own) if use_cuda else CPUPlace()
        check_place(place)
        self._executor = Executor(place)

    @property
    def device_count(self) -> int:
        """How many devices this process has: one."""
        return 1

    def run(
        self,
        fetch_list: Sequence[str | Variable] | None = None,
        feed: Mapping[str, Any] | None = None,
    ) -> list[npt.NDArray[Any]]:
        """Make one step; see `Executor.run`."""
        return self._executor.run(self._program, feed=feed, fetch_list=fetch_list)
