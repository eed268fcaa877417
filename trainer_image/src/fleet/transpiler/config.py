"""What the user may configure about transpiling: the original's fields, with its defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import IntEnum
from typing import Protocol

from fleet.errors import TranspileError
from fleet.transpiler.dispatch import PSDispatcher, RoundRobin

__all__ = ["DistributeTranspilerConfig", "DistributedMode", "TrainingMode"]

_SMALLEST_BLOCK = 8192
_PUSH_NUMS = 100


class DistributedMode(IntEnum):
    """How trainers and servers keep step; the numbers are `listen_and_serv`'s `distributed_mode`."""

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3


class TrainingMode(Protocol):
    """What the programs say about a mode of the user's own; see `fleet.parameter_server.modes.Mode`."""

    @property
    def name(self) -> str:
        """What the mode is called."""

    @property
    def programs(self) -> DistributedMode:
        """The mode whose programs it runs on."""

    def agreement(self) -> Mapping[str, str]:
        """Return what every process must have in common, beside the name."""


@dataclass(slots=True)
class DistributeTranspilerConfig:
    """The configuration of a `DistributeTranspiler`. Set the fields, then hand it over.

    Attributes
    ----------
    slice_var_up : bool
        Cut parameters into blocks so that all servers share the work.
    split_method : type
        `RoundRobin`, `HashName`, or a `PSDispatcher` of your own.
    min_block_size : int
        A block has at least this many elements; 8192 or more.
    sync_mode : bool
        Together with transpile's `sync_mode`: False in either means asynchronous training.
    runtime_split_send_recv : bool
        Asynchronous training in which the sender cuts the gradients; without it, half-asynchronous.
    mode : str
        ``pserver``. Collective training has a fleet of its own.
    half_async : bool
        Half-asynchronous training, also where the sender cuts the gradients.
    completely_not_async : bool
        With an asynchronous `sync_mode`: synchronous training after all, as the original's
        `SyncStrategy` says it.
    enable_dc_asgd : bool
        Asynchronous training that compensates for delay (DC-ASGD).
    geo_sgd_mode : bool
        GEO: trainers step by themselves, and exchange what has changed now and then.
    geo_sgd_need_push_nums : int
        After how many steps a trainer of GEO sends what has changed.
    wait_port : bool
        Trainers wait until every server accepts connections before they start, and say for whom. Without
        it a server that is not there yet is waited for in the call that joins it. Either way for
        `FLAGS_rpc_deadline` at most.
    print_log : bool
        Log where each block goes.

    Notes
    -----
    The other fields are the original's too. Those are not supported yet, and a value other than the
    default is an error at transpile that names the field.
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
    geo_sgd_need_push_nums: int = _PUSH_NUMS
    nccl_comm_num: int = 1
    use_hierarchical_allreduce: bool = False
    hierarchical_allreduce_inter_nranks: int = 0
    collective_mode: str | None = None

    def __setattr__(self, name: str, value: object) -> None:
        known = [field.name for field in fields(self)]
        if name not in known:
            raise AttributeError(
                f"DistributeTranspilerConfig has no field {name!r}{_meant(name, known)}; its fields are "
                f"{', '.join(known)}"
            )
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Check every field.

        Raises
        ------
        TranspileError
            A field has a value of the wrong type or range, or one that is not supported yet.
        """
        self._check_mode()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _NOT_YET and value != field.default:
                raise TranspileError(
                    f"config.{field.name} = {value!r} is not supported yet: {_COLLECTIVE}; "
                    f"leave it at {field.default!r}"
                )
            if isinstance(field.default, bool):
                self._check_bool(field.name, value)
        if not isinstance(self.split_method, type) or not issubclass(self.split_method, PSDispatcher):
            raise TranspileError(
                f"config.split_method is {self.split_method!r}; expected a class: RoundRobin, HashName or "
                "a subclass of PSDispatcher"
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

    def _check_mode(self) -> None:
        if self.mode in _COLLECTIVE_MODES:
            raise TranspileError(f"config.mode = {self.mode!r} is not supported yet: {_COLLECTIVE}")
        if self.mode != "pserver":
            raise TranspileError(
                f"config.mode is {self.mode!r}; expected 'pserver' ({' and '.join(_COLLECTIVE_MODES)}, the "
                f"original's others, are not supported yet: {_COLLECTIVE})"
            )

    @staticmethod
    def _check_bool(name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise TranspileError(f"config.{name} is {value!r}; expected True or False")

    def distributed_mode(self, sync_mode: bool) -> DistributedMode:
        """Return the mode that these fields and transpile's `sync_mode` give together.

        Raises
        ------
        TranspileError
            Two fields contradict each other; the message names them.
        """
        mode = self._mode(sync_mode)
        self.check_options(mode)
        return mode

    def asks_for(self) -> DistributedMode | None:
        """Return the mode that these fields ask for by themselves; None where they leave it open."""
        flags = (self.geo_sgd_mode, self.half_async, self.completely_not_async, self.runtime_split_send_recv)
        return None if self.sync_mode and not any(flags) else self._mode(sync_mode=False)

    def check_options(self, mode: DistributedMode) -> None:
        """Check the fields that have a meaning in one mode only.

        Raises
        ------
        TranspileError
            Such a field is set, and the mode is another.
        """
        if self.enable_dc_asgd and mode is not DistributedMode.ASYNC:
            raise TranspileError(
                f"config.enable_dc_asgd = True compensates for the delay of async training, and the mode is "
                f"{mode.name.lower()}; use the async mode (sync_mode = False and "
                "runtime_split_send_recv = True), or leave it at False"
            )
        if self.geo_sgd_need_push_nums != _PUSH_NUMS and mode is not DistributedMode.GEO:
            raise TranspileError(
                f"config.geo_sgd_need_push_nums = {self.geo_sgd_need_push_nums} belongs to GEO, and the mode "
                f"is {mode.name.lower()}; set config.geo_sgd_mode = True, or leave it at {_PUSH_NUMS}"
            )

    def _mode(self, sync_mode: bool) -> DistributedMode:
        if self.geo_sgd_mode:
            for name in ("half_async", "completely_not_async"):
                if getattr(self, name):
                    raise TranspileError(
                        f"config.geo_sgd_mode = True and config.{name} = True ask for two modes; "
                        "set one of them to False"
                    )
            return DistributedMode.GEO
        if not (sync_mode and self.sync_mode):
            if self.completely_not_async:
                return DistributedMode.SYNC
            whole = self.runtime_split_send_recv and not self.half_async
            return DistributedMode.ASYNC if whole else DistributedMode.HALF_ASYNC
        for name in ("runtime_split_send_recv", "half_async"):
            if getattr(self, name):
                raise TranspileError(
                    f"config.{name} = True needs asynchronous training; "
                    "set config.sync_mode = False too, or leave it at False"
                )
        return DistributedMode.SYNC


def _meant(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


_COLLECTIVE = "collective training does not go through the transpiler, use fleet.collective"
_COLLECTIVE_MODES = ("nccl2", "collective")
_NOT_YET = frozenset(
    {
        "nccl_comm_num",
        "use_hierarchical_allreduce",
        "hierarchical_allreduce_inter_nranks",
        "collective_mode",
    }
)
