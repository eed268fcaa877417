"""Paddle's executor for collective training."""

from collections.abc import Sequence
from typing import Any

import torch

from fleet.errors import ConfigurationError
from fleet.fluid.execution import is_built
from fleet.fluid.executor import Executor, Feed, source_of
from fleet.fluid.ir import Variable
from fleet.fluid.originals import PARALLEL_EXECUTOR, check_arguments
from fleet.fluid.place import CPUPlace, CUDAPlace, Place, check_place
from fleet.fluid.program import Program, default_main_program

__all__ = ["ParallelExecutor"]


class ParallelExecutor:
    """Runs training steps as one of several trainers; see mode ``nccl2`` of `DistributeTranspiler`.

    Parameters
    ----------
    use_cuda : bool
        Compute on a GPU. The place of the `Executor` that ran the startup program determines the model's
        device.
    loss_name : str, optional
        As in Paddle: a variable of the program.
    main_program : Program, optional
        By default ``fleet.default_main_program()``.
    num_trainers, trainer_id : int
        The values that were passed to ``transpile``.
    share_vars_from : ParallelExecutor, optional
        Has no effect, because programs of one model share its parameters. An executor of another model is
        refused.
    **originals
        Other arguments of Paddle, which are refused by name.

    Raises
    ------
    ConfigurationError
        An argument differs from what the program was transpiled for, the program has no such variable, there
        is no GPU, or an argument requests something unsupported.

    Notes
    -----
    Paddle's ``fluid.ParallelExecutor``.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        *,
        num_trainers: int = 1,
        trainer_id: int = 0,
        share_vars_from: "ParallelExecutor | None" = None,
        **originals: Any,
    ) -> None:
        check_arguments("ParallelExecutor", originals, PARALLEL_EXECUTOR)
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
        if share_vars_from is not None:
            self._check_model_of(share_vars_from)
        self._use_cuda = use_cuda
        if use_cuda:
            check_place(CUDAPlace())

    @property
    def device_count(self) -> int:
        """The number of devices in this process, always one."""
        return 1

    def run(
        self,
        fetch_list: Sequence[str | Variable] | None = None,
        feed: Feed | None = None,
        feed_dict: Feed | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run one training step; see `Executor.run`.

        Parameters
        ----------
        fetch_list : sequence of str or Variable, optional
            The variables to return.
        feed : mapping of str to array, or sequence of one such mapping, optional
            The batch, by variable.
        feed_dict : mapping of str to array, optional
            Paddle's older name for `feed`.
        return_numpy : bool
            False returns LoDTensors.

        Returns
        -------
        list of numpy.ndarray or LoDTensor
            The values of `fetch_list`.

        Raises
        ------
        ConfigurationError
            As for `Executor.run`; or both `feed` and `feed_dict` are given.
        """
        if feed is not None and feed_dict is not None:
            raise ConfigurationError(
                "ParallelExecutor.run: feed and feed_dict are given, which are one; expected feed alone"
            )
        feed = feed if feed is not None else feed_dict
        executor = Executor(self._place())
        return executor.run(self._program, feed=feed, fetch_list=fetch_list, return_numpy=return_numpy)

    def _check_model_of(self, other: object) -> None:
        shared = other._program if isinstance(other, ParallelExecutor) else Program()  # noqa: SLF001 (its own)
        if is_built(shared) and is_built(self._program):
            return  # programs of one scope share its variables
        if shared.source is None or shared.source.module is not source_of(self._program).module:
            raise ConfigurationError(
                "ParallelExecutor: share_vars_from runs no program of this model, and those of one share "
                "its parameters; expected a ParallelExecutor whose program was captured from the same module"
            )

    def _place(self) -> Place:
        """Return the model's place, to which feeds are also moved."""
        if is_built(self._program) and self._program.source is None:  # its first run binds it
            return CUDAPlace() if self._use_cuda else CPUPlace()
        parameter = next(iter(source_of(self._program).parameters.values()), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        if (device.type == "cuda") != self._use_cuda:
            expected = (
                "the startup program run first, by fleet.Executor(fleet.CUDAPlace(number))"
                if self._use_cuda
                else "use_cuda=True"
            )
            raise ConfigurationError(
                f"ParallelExecutor: use_cuda is {self._use_cuda}, and the model is on {device}; "
                f"expected {expected}"
            )
        return CUDAPlace(device.index) if self._use_cuda else CPUPlace()
