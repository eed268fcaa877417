"""The configuration of the transpiler, with Paddle's fields and defaults."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from fleet.errors import TranspileError, meant
from fleet.options import Where, refusal
from fleet.plan.dispatch import HashName, PSDispatcher, RoundRobin

__all__ = ["DistributeTranspilerConfig", "DistributedMode", "TrainingMode"]

# Paddle asserts the same limit.
_SMALLEST_BLOCK = 8192
_DISPATCHERS: dict[str, type[PSDispatcher]] = {each.__name__: each for each in (RoundRobin, HashName)}
_log = logging.getLogger(__name__)


class DistributedMode(IntEnum):
    """A mode of synchronization between trainers and servers; the values are Paddle's ``distributed_mode``.

    Notes
    -----
    Paddle's ``DistributedMode`` of ``fluid.transpiler.distribute_transpiler``.
    """

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3


class TrainingMode(Protocol):
    """The part of a user-defined mode that a plan needs; see `fleet.parameter_server.modes.Mode`."""

    @property
    def name(self) -> str:
        """The mode's name."""

    @property
    def programs(self) -> DistributedMode:
        """The built-in mode whose programs the transpiler generates for this mode."""

    def agreement(self) -> Mapping[str, str]:
        """Return the mode's options that must be equal in every process."""


@dataclass(slots=True)
class DistributeTranspilerConfig:
    """The configuration of a `DistributeTranspiler`. Set its fields before you create the transpiler.

    Attributes
    ----------
    slice_var_up : bool
        Slice parameters into blocks so that all servers share the work.
    split_method : type
        `RoundRobin`, `HashName`, or your own subclass of `PSDispatcher`. The first two may also be given by
        name, as a string.
    min_block_size : int
        The minimum number of elements in a block; 8192 or more.
    sync_mode : bool
        Combined with the `sync_mode` argument of ``transpile``: False in either one means asynchronous
        training.
    runtime_split_send_recv : bool
        True: asynchronous training, in which the sending thread slices the gradients. False:
        half-asynchronous training, if `sync_mode` is False.
    mode : str
        ``pserver``; or, for a transpiler that the script calls itself, ``nccl2`` or ``collective``, which
        produce the programs of collective training.
    half_async : bool
        Half-asynchronous training, even if the sending thread slices the gradients.
    completely_not_async : bool
        Synchronous training even though `sync_mode` is False. Paddle's `SyncStrategy` requests it in
        this way.
    enable_dc_asgd : bool
        Asynchronous training that compensates for delay (DC-ASGD). If `sync_mode` is False and no field
        requests another mode, the mode is async.
    geo_sgd_mode : bool
        GEO: each trainer updates its own copy, and exchanges the changes at intervals.
    geo_sgd_need_push_nums : int
        GEO: the number of steps between two exchanges.
    wait_port : bool
        Before trainers start, they wait until every server accepts connections, and log which servers are
        missing. If False, a trainer waits for a missing server in the call that joins it. Both waits end at
        the deadline for starting (`FLEET_START_DEADLINE_SECONDS`, else `FLAGS_rpc_deadline`).
    print_log : bool
        Log the server of each block.
    nccl_comm_num, use_hierarchical_allreduce, hierarchical_allreduce_inter_nranks
        Refused: in collective training all gradients use one communicator, without a hierarchy.
    remote_prefetch : bool
        True: the tables of ``is_sparse`` look-ups are on the servers alone, and trainers fetch the rows of
        each look-up. False: each trainer also has a copy of these tables, and the servers send it the rows
        that a step has changed; tables of ``is_distributed`` look-ups stay on the servers alone.
    collective_mode : str or None
        ``grad_allreduce``, the default of collective training, or ``local_sgd``.

    Notes
    -----
    Paddle's ``fluid.transpiler.DistributeTranspilerConfig``. `fleet.options` lists where each field is
    supported. Elsewhere a value other than the default raises an error that names the field.
    """

    slice_var_up: bool = True
    split_method: type[PSDispatcher] = RoundRobin
    min_block_size: int = _SMALLEST_BLOCK
    enable_dc_asgd: bool = False
    mode: str = "pserver"
    print_log: bool = False
    wait_port: bool = True
    runtime_split_send_recv: bool = False
    sync_mode: bool = True
    half_async: bool = False
    completely_not_async: bool = False
    geo_sgd_mode: bool = False
    geo_sgd_need_push_nums: int = 100
    nccl_comm_num: int = 1
    use_hierarchical_allreduce: bool = False
    hierarchical_allreduce_inter_nranks: int = 0
    collective_mode: str | None = None
    remote_prefetch: bool = True

    def __new__(cls, *_: object, **given: object) -> "DistributeTranspilerConfig":
        """Raise TypeError for an unknown field, with the same message as attribute assignment."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise TypeError(_unknown(unknown[0], known))
        return object.__new__(cls)  # super() does not work in a dataclass with slots

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __setattr__(self, name: str, value: object) -> None:
            known = [field.name for field in fields(self)]
            if name not in known:
                raise AttributeError(_unknown(name, known))
            if name == "split_method" and isinstance(value, str):
                value = _DISPATCHERS.get(value, value)
            object.__setattr__(self, name, value)

    def check(self) -> None:
        """Check the value of every field.

        Raises
        ------
        TranspileError
            A field has a value of the wrong type or range, or one that parameter servers do not support.
        """
        if self.mode not in ("pserver", "nccl2", "collective"):
            raise TranspileError(
                f"config.mode is {self.mode!r}; expected 'pserver' (or, of a transpiler that is called by "
                "hand, 'nccl2' or 'collective', for collective training)"
            )
        for field in fields(self):
            if isinstance(field.default, bool):
                self._check_bool(field.name, getattr(self, field.name))
        for name in _ONLY_COLLECTIVE:
            self._refuse(name, Where(servers=True))
        if not isinstance(self.split_method, type) or not issubclass(self.split_method, PSDispatcher):
            raise TranspileError(
                f"config.split_method is {self.split_method!r}; expected RoundRobin, HashName or a subclass "
                "of PSDispatcher"
            )
        size = self.min_block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < _SMALLEST_BLOCK:
            raise TranspileError(
                f"config.min_block_size is {size!r}; expected a whole number of at least {_SMALLEST_BLOCK}"
            )
        pushes = self.geo_sgd_need_push_nums
        if isinstance(pushes, bool) or not isinstance(pushes, int) or pushes < 1:
            raise TranspileError(
                f"config.geo_sgd_need_push_nums is {pushes!r}; expected a whole number of steps, at least 1"
            )

    def check_collective(self) -> None:
        """Raise an error if a field has a non-default value that collective training does not support.

        Raises
        ------
        TranspileError
            A field is not supported; the message names the first one.
        """
        for field in fields(self):
            self._refuse(field.name, Where(servers=False, by_executor=True))

    def _refuse(self, name: str, where: Where) -> None:
        default = self.__dataclass_fields__[name].default
        if (reason := refusal(f"config.{name}", getattr(self, name), default, where)) is not None:
            raise TranspileError(reason)

    @staticmethod
    def _check_bool(name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise TranspileError(f"config.{name} is {value!r}; expected True or False")

    def distributed_mode(self, sync_mode: bool) -> DistributedMode:
        """Return the mode selected by these fields and by the `sync_mode` argument of ``transpile``.

        Parameters
        ----------
        sync_mode : bool
            The argument of ``DistributeTranspiler.transpile``.

        Returns
        -------
        DistributedMode
            The mode of trainers and servers.

        Raises
        ------
        TranspileError
            Two fields contradict each other; the message names them.
        """
        mode = self._mode(sync_mode)
        self.check_options(mode)
        return mode

    def asks_for(self) -> DistributedMode | None:
        """Return the mode that these fields select, or None if they do not select one."""
        return self._mode(sync_mode=False) if self.mode_flags() else None

    def mode_flags(self) -> str:
        """Return the fields that select a mode, formatted as in a script; empty if there are none."""
        set_fields = ["config.sync_mode = False"] if not self.sync_mode else []
        set_fields += [f"config.{name} = True" for name in _MODE_FLAGS if getattr(self, name)]
        return ", ".join(set_fields)

    def check_options(self, mode: DistributedMode, *, custom: bool = False) -> None:
        """Raise an error if a field that is set does not apply to the job's mode.

        Parameters
        ----------
        mode : DistributedMode
        custom : bool
            True if the job runs a user-defined mode, and `mode` only determines its programs.

        Raises
        ------
        TranspileError
            Such a field is set.
        """
        for name in (*_OF_ONE_MODE, "sync_mode", *_MODE_FLAGS) if custom else _OF_ONE_MODE:
            self._refuse(name, Where(servers=True, mode="own" if custom else mode.name.lower()))
        if self.enable_dc_asgd and not self.runtime_split_send_recv:
            say_that_async_follows()

    def _mode(self, sync_mode: bool) -> DistributedMode:
        if self.geo_sgd_mode:
            for name in ("half_async", "completely_not_async"):
                if getattr(self, name):
                    raise TranspileError(
                        f"config.geo_sgd_mode = True and config.{name} = True request two modes; "
                        "set one of them to False"
                    )
            return DistributedMode.GEO
        if not (sync_mode and self.sync_mode):
            if self.completely_not_async:
                return DistributedMode.SYNC
            at_once = (self.runtime_split_send_recv or self.enable_dc_asgd) and not self.half_async
            return DistributedMode.ASYNC if at_once else DistributedMode.HALF_ASYNC
        for name in ("runtime_split_send_recv", "half_async"):
            if getattr(self, name):
                raise TranspileError(
                    f"config.{name} = True needs asynchronous training; "
                    "set config.sync_mode = False too, or leave it at False"
                )
        return DistributedMode.SYNC


def _unknown(name: str, known: list[str]) -> str:
    return (
        f"DistributeTranspilerConfig has no field {name!r}{meant(name, known)}; its fields are "
        f"{', '.join(known)}"
    )


@functools.cache
def say_that_async_follows() -> None:
    """Warn once that the fields imply async mode although the script does not name that mode."""
    _log.warning("config.enable_dc_asgd = True and sync_mode = False: the mode is async")


_MODE_FLAGS = ("geo_sgd_mode", "half_async", "completely_not_async", "runtime_split_send_recv")
_OF_ONE_MODE = ("enable_dc_asgd", "geo_sgd_need_push_nums")
_ONLY_COLLECTIVE = (
    "mode",
    "nccl_comm_num",
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
    "collective_mode",
)
