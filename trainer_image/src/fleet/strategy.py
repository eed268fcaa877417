"""Strategies, which hold the training options that a script sets.

A `mode` object of the script, `sync_mode` or the fields of the transpiler config determine the mode. If two
of them contradict each other, an error is raised. If none is set, the job determines the mode
(`FLEET_SYNC_MODE`).
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from fleet.averaging import LocalSGD, PowerSGD
from fleet.errors import ConfigurationError, TranspileError, meant
from fleet.options import Where, refusal
from fleet.plan.clipping import GradClip, check_grad_clip
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.role_maker.variables import SYNC_MODES

__all__ = [
    "ORIGINALS",
    "DistributedStrategy",
    "StrategyFactory",
    "StrategyFields",
    "create_async_strategy",
    "create_geo_strategy",
    "create_half_async_strategy",
    "create_sync_strategy",
    "strategy_of",
]

_MODE_OF_JOB: Final = dict(zip(SYNC_MODES, DistributedMode, strict=True))
_FIELDS_OF_MODE: Final[dict[DistributedMode, dict[str, Any]]] = {
    DistributedMode.SYNC: {"sync_mode": True, "runtime_split_send_recv": False},
    DistributedMode.ASYNC: {"sync_mode": False, "runtime_split_send_recv": True},
    DistributedMode.HALF_ASYNC: {"sync_mode": False, "half_async": True},
    DistributedMode.GEO: {"sync_mode": False, "geo_sgd_mode": True},
}

_LOCAL = "set strategy.local_sgd = fleet.LocalSGD(k_steps=8); collective training only"
_FIXED = (
    "its k would depend on the loss, which an optimizer does not receive; set strategy.local_sgd = "
    "fleet.LocalSGD(k_steps=8, begin_step=30)"
)
_RECOMPUTED = "use torch.utils.checkpoint in the model"
_AUTOCAST = "run the forward pass under torch.autocast"
_UNUSED = "trainers exchange in every pass which parameters they have used; leave it out"
_BUCKETS = "gradients are sent in torch's buckets, and are views of them; leave it out"
_EXECUTED = "PyTorch runs the model, and has its own settings"
ORIGINALS: Final[Mapping[str, str]] = {
    "use_local_sgd": _LOCAL,
    "local_sgd_config": _LOCAL,
    "localsgd": _LOCAL,
    "localsgd_configs": _LOCAL,
    "adaptive_localsgd": _FIXED,
    "adaptive_localsgd_configs": _FIXED,
    "use_dgc": "gradients are always sent whole; use wire_dtype='bfloat16' or power_sgd",
    "use_amp": _AUTOCAST,
    "amp_loss_scaling": _AUTOCAST,
    "forward_recompute": _RECOMPUTED,
    "recompute_checkpoints": _RECOMPUTED,
    "fuse_all_reduce_ops": _BUCKETS,
    "fuse_grad_size_in_MB": _BUCKETS,
    "bucket_cap_mb": _BUCKETS,
    "gradient_as_bucket_view": _BUCKETS,
    "find_unused_parameters": _UNUSED,
    "static_graph": _UNUSED,
    "sync_batch_norm": "pass the model to torch.nn.SyncBatchNorm.convert_sync_batchnorm, on GPUs",
    "exec_strategy": _EXECUTED,
    "build_strategy": _EXECUTED,
}
"""Fields that only Paddle's strategy or `DistributedDataParallel` has, and what to use instead."""


@dataclass(kw_only=True)
class DistributedStrategy:
    """The training options of a job.

    Set fields in the constructor, or before the call of ``distributed_optimizer``. Each value is checked when
    it is set; contradictions between values are found when the strategy is used.

    Attributes
    ----------
    sync_mode : bool or None
        True for synchronous training, False for an asynchronous mode: the one that `transpiler` requests,
        else half-async. None leaves it to `transpiler`, and then to the job (`FLEET_SYNC_MODE`).
    mode : TrainingMode or None
        A user-defined mode: an instance of a subclass of `fleet.parameter_server.modes.Mode`.
    overlap : bool or None
        True: send each gradient as soon as it is computed; changing it afterwards is an error. False: send
        all gradients in `optimizer.step()`, so that they may be changed after the backward pass. None: as
        False in the first three steps. Then as True, unless the script has clipped, scaled, accumulated or
        otherwise changed gradients.
    cross_step : bool
        Wait for new values layer by layer in the next forward pass, not in `optimizer.step()`. The script
        must then read parameters only through the modules that own them, and pass the model to
        `distributed_optimizer`. Synchronous and asynchronous training only; half-async and GEO do not wait.
    server_kernels : str
        ``default``: the servers step with the user's kernel flags; the result is bitwise-identical to that of
        one process. ``fused``: they use the fused kernels of the optimizer's class, which read memory once
        and round differently.
    transport : str
        How gradients and values travel between a trainer and a parameter server. ``auto``: through shared
        memory if both run on one host as one user, else over TCP. ``tcp``: always over TCP.
        ``shared_memory``: as ``auto``, but a server that cannot share memory is an error that names it.
    wire_dtype : str or None
        ``bfloat16``: gradients and values of longer floating-point numbers travel as bfloat16, over TCP. The
        servers keep and step the parameters' own dtype. In collective training only gradients are converted,
        except float64; ``float16`` is allowed as well. None: nothing is converted.
    local_sgd : LocalSGD or None
        Trainers step locally, and average their parameters at intervals. Collective training only.
    power_sgd : PowerSGD or None
        Gradients are compressed to products of narrow matrices. Collective training only.
    broadcast_buffers : bool
        Whether a model's buffers, such as BatchNorm's statistics, take trainer 0's values with each average.
        Collective training only; with parameter servers each trainer keeps its own buffers.
    grad_clip : ClipGradByValue, ClipGradByNorm, ClipGradByGlobalNorm or None
        How the servers clip the gradients, after averaging over the trainers. Synchronous training only.
    non_finite : str
        How to handle a gradient that holds NaN or infinity. ``warn``: log one warning. The first steps and
        every sixteenth step are checked; rows of tables are checked in every step. ``stop``: raise an error
        before the gradient is sent. ``skip``: no trainer runs the step; in the asynchronous modes, only this
        trainer skips it. ``stop`` and ``skip`` read all gradients once more in each step, and with parameter
        servers all gradients are sent in `optimizer.step()`.
    transpiler : DistributeTranspilerConfig
        How parameters are sliced into blocks and dispatched to servers.

    Raises
    ------
    ConfigurationError
        A value is unknown or not supported; the message names the field.

    Notes
    -----
    Paddle's ``DistributedStrategy`` holds a transpiler's config and options for sending; this class adds
    options for PyTorch, collective training and the servers' kernels.
    """

    sync_mode: bool | None = None
    mode: TrainingMode | None = None
    overlap: bool | None = None
    cross_step: bool = False
    server_kernels: str = "default"
    transport: str = "auto"
    wire_dtype: str | None = None
    local_sgd: LocalSGD | None = None
    power_sgd: PowerSGD | None = None
    broadcast_buffers: bool = True
    grad_clip: GradClip | None = None
    non_finite: str = "warn"
    transpiler: DistributeTranspilerConfig = field(default_factory=DistributeTranspilerConfig)

    def __new__(cls, **given: object) -> "DistributedStrategy":
        """Raise TypeError for an unknown field, with the same message as attribute assignment."""
        if unknown := [name for name in given if name not in _CHECKS]:
            raise TypeError(_unknown(unknown[0]))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __setattr__(self, name: str, value: object) -> None:
            check = _CHECKS.get(name)
            if check is None:
                raise AttributeError(_unknown(name))
            check(name, value)
            object.__setattr__(self, name, value)

    def check(self) -> None:
        """Check that the fields do not contradict each other.

        Raises
        ------
        ConfigurationError
            Two fields contradict each other; the message names both.
        """
        if self.wire_dtype is not None and self.transport == "shared_memory":
            raise ConfigurationError(
                f"strategy.wire_dtype is {self.wire_dtype!r}, and strategy.transport is 'shared_memory', "
                "which sends no tensors over the network; leave one of them at its default"
            )
        if self.wire_dtype is not None and self.transpiler.enable_dc_asgd:
            raise ConfigurationError(
                f"strategy.wire_dtype is {self.wire_dtype!r}, and transpiler.enable_dc_asgd compensates for "
                "the delay of values that are not rounded; leave one of them at its default"
            )
        if self.overlap is True and self.non_finite != "warn":
            raise ConfigurationError(
                f"strategy.overlap is True, and strategy.non_finite is {self.non_finite!r}, with which no "
                "gradient may be sent before all are computed; leave overlap at None"
            )
        if self.server_kernels != "default" and getattr(self.mode, "steps_locally", False):
            raise ConfigurationError(
                f"strategy.server_kernels is {self.server_kernels!r}, but in the mode of strategy.mode the "
                "servers do not step; pass fused=True to your own optimizer instead"
            )
        self._check_averaging()
        self._check_mode()

    def parameters_averaged(self) -> LocalSGD | None:
        """Return the options of local SGD, or None if gradients rather than parameters are averaged."""
        if self.local_sgd is None and self.transpiler.collective_mode == "local_sgd":
            return LocalSGD()
        return self.local_sgd

    def check_works(self, where: Where) -> None:
        """Check that a training method supports every field that differs from its default.

        Parameters
        ----------
        where : Where
            The way of training.

        Raises
        ------
        ConfigurationError
            A field is not supported; the message names the first one, and an alternative.
        """
        for owner, prefix in ((self, "strategy"), (self.transpiler, "config")):
            if where.servers and owner is not self:
                return  # the transpiler's config checks its own fields
            for each in fields(owner):
                if each.default is not MISSING:
                    value = getattr(owner, each.name)
                    if (reason := refusal(f"{prefix}.{each.name}", value, each.default, where)) is not None:
                        raise ConfigurationError(reason)

    def _check_averaging(self) -> None:
        """Raise an error if the fields request more than one way of averaging."""
        asked = {
            "local_sgd": self.parameters_averaged(),
            "power_sgd": self.power_sgd,
            "wire_dtype": self.wire_dtype,
        }
        given = [f"strategy.{name} is {value!r}" for name, value in asked.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"{' and '.join(given)}: only one kind of averaging is possible; leave all but one at None"
            )
        if self.local_sgd is not None and self.transpiler.collective_mode == "grad_allreduce":
            raise ConfigurationError(
                f"{given[0]}, and strategy.transpiler.collective_mode is 'grad_allreduce'; leave one of them "
                "at None"
            )
        if self.parameters_averaged() is not None and self.non_finite == "skip":
            raise ConfigurationError(
                f"{given[0]}, and strategy.non_finite is 'skip', which needs averaged gradients to be the "
                "same on every trainer; set it to 'stop'"
            )

    def _check_mode(self) -> None:
        """Raise an error if the fields request more than one mode."""
        try:
            asked = self.transpiler.asks_for()
        except TranspileError as error:
            raise ConfigurationError(f"strategy.transpiler: {error}") from error
        if self.mode is not None:
            found = ""
            if self.sync_mode is not None:
                found = f"strategy.sync_mode = {self.sync_mode} requests {_said(self.sync_mode)}"
            elif asked is not None:
                found = f"strategy.transpiler requests {_said(asked)} ({self.transpiler.mode_flags()})"
            if found:
                raise ConfigurationError(
                    f"strategy.mode is {self.mode.name!r}, but {found}; leave it at its default if mode is "
                    "set"
                )
        if self.sync_mode is True and asked not in (None, DistributedMode.SYNC):
            raise ConfigurationError(
                f"strategy.sync_mode is True, but strategy.transpiler requests {_said(asked)} "
                f"({self.transpiler.mode_flags()}); set sync_mode = False, or leave the config's fields of "
                "the mode at their defaults"
            )
        if self.sync_mode is False and asked is DistributedMode.SYNC:
            raise ConfigurationError(
                "strategy.sync_mode is False, but strategy.transpiler requests sync (completely_not_async = "
                "True); change one of them"
            )

    def resolved(self, job_sync_mode: str) -> "DistributedStrategy":
        """Return a copy of this strategy whose unset mode is taken from the job.

        Parameters
        ----------
        job_sync_mode : str
            `Role.sync_mode`, which is `FLEET_SYNC_MODE`.

        Returns
        -------
        DistributedStrategy
            With a `sync_mode` that is not None, and a `transpiler` that requests the mode unless `mode` is
            set.

        Raises
        ------
        ConfigurationError
            The job requests an unknown mode, the fields contradict each other, or parameter servers do not
            support one of them in that mode.
        """
        self.check()
        if job_sync_mode not in SYNC_MODES:
            raise ConfigurationError(
                f"FLEET_SYNC_MODE is {job_sync_mode!r}; expected one of {', '.join(SYNC_MODES)}"
            )
        if self.mode is not None:
            resolved = replace(self)
        elif (mode := self._mode_asked_for()) is None:
            resolved = self._for_mode(_MODE_OF_JOB[job_sync_mode])
        else:
            resolved = self._for_mode(mode)
        resolved.check_works(resolved.where())
        return resolved

    def where(self, *, by_executor: bool = False) -> Where:
        """Return the training method that a resolved strategy requests with parameter servers.

        Parameters
        ----------
        by_executor : bool
            True if an `Executor` runs the steps, False if the script's own loop does.

        Returns
        -------
        Where
            The argument of `check_works`.
        """
        asked = self.transpiler.asks_for() or DistributedMode.SYNC
        name = "own" if self.mode is not None else asked.name.lower()
        return Where(servers=True, mode=name, by_executor=by_executor)

    def _mode_asked_for(self) -> DistributedMode | None:
        if self.sync_mode is None:
            return self.transpiler.asks_for()
        if self.sync_mode:
            return DistributedMode.SYNC
        return replace(self.transpiler, sync_mode=False).asks_for()

    def _for_mode(self, mode: DistributedMode) -> "DistributedStrategy":
        config = self.transpiler
        if self.sync_mode is False:
            config = replace(config, sync_mode=False)
        return replace(self, sync_mode=mode is DistributedMode.SYNC, transpiler=_config_for(mode, config))


def strategy_of(given: DistributedStrategy | DistributeTranspilerConfig | None) -> DistributedStrategy:
    """Return the given strategy; None gives a default strategy, and a transpiler's config is wrapped in one.

    Raises
    ------
    ConfigurationError
        The value is neither.
    """
    if given is None:
        return DistributedStrategy()
    if isinstance(given, DistributeTranspilerConfig):
        return DistributedStrategy(transpiler=given)
    if not isinstance(given, DistributedStrategy):
        raise ConfigurationError(
            f"strategy is {given!r}; expected a fleet.DistributedStrategy, or a "
            "fleet.DistributeTranspilerConfig"
        )
    return given


class StrategyFields(TypedDict, total=False):
    """The keyword arguments of the ``create_..._strategy`` functions."""

    overlap: bool | None
    cross_step: bool
    server_kernels: str
    transport: str
    wire_dtype: str | None
    local_sgd: LocalSGD | None
    power_sgd: PowerSGD | None
    broadcast_buffers: bool
    grad_clip: GradClip | None
    non_finite: str
    transpiler: DistributeTranspilerConfig


def create_sync_strategy(**fields: Unpack[StrategyFields]) -> DistributedStrategy:
    """Return a strategy for synchronous training, where each step uses all trainers' gradients.

    Parameters
    ----------
    **fields
        Those of `DistributedStrategy` except `sync_mode` and `mode`. The function sets the fields of
        `transpiler` that determine the mode.

    Returns
    -------
    DistributedStrategy
        With `sync_mode` True.

    Raises
    ------
    TypeError
        There is no such field; the message suggests a similar one.
    ConfigurationError
        A value is unknown, or contradicts another; the message names the field.

    Notes
    -----
    Paddle's is ``StrategyFactory.create_sync_strategy()``.
    """
    return _create(DistributedMode.SYNC, fields)


def create_async_strategy(**fields: Unpack[StrategyFields]) -> DistributedStrategy:
    """Return a strategy for asynchronous training, where servers apply gradients on arrival.

    Parameters
    ----------
    **fields
        As for `create_sync_strategy`.

    Returns
    -------
    DistributedStrategy
        With `sync_mode` False, and a `transpiler` that requests the mode.

    Raises
    ------
    TypeError, ConfigurationError
        As for `create_sync_strategy`.

    Notes
    -----
    Paddle's is ``StrategyFactory.create_async_strategy()``.
    """
    return _create(DistributedMode.ASYNC, fields)


def create_half_async_strategy(**fields: Unpack[StrategyFields]) -> DistributedStrategy:
    """Return a strategy for half-asynchronous training, where trainers do not wait for the servers.

    Parameters
    ----------
    **fields
        As for `create_sync_strategy`.

    Returns
    -------
    DistributedStrategy
        With `sync_mode` False, and a `transpiler` that requests the mode.

    Raises
    ------
    TypeError, ConfigurationError
        As for `create_sync_strategy`.

    Notes
    -----
    Paddle's is ``StrategyFactory.create_half_async_strategy()``.
    """
    return _create(DistributedMode.HALF_ASYNC, fields)


def create_geo_strategy(update_frequency: int = 100, **fields: Unpack[StrategyFields]) -> DistributedStrategy:
    """Return a strategy for GEO, where trainers update local copies and periodically exchange changes.

    Parameters
    ----------
    update_frequency : int
        The number of steps between two exchanges of a trainer.
    **fields
        As for `create_sync_strategy`.

    Returns
    -------
    DistributedStrategy
        With `sync_mode` False, and a `transpiler` that requests the mode.

    Raises
    ------
    TypeError, ConfigurationError
        As for `create_sync_strategy`.

    Notes
    -----
    Paddle's is ``StrategyFactory.create_geo_strategy(update_frequency=100)``.
    """
    return _create(DistributedMode.GEO, fields, geo_sgd_need_push_nums=update_frequency)


class StrategyFactory:
    """The four ``create_..._strategy`` functions as static methods, as in Paddle.

    Notes
    -----
    ``fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy.StrategyFactory``.
    """

    create_sync_strategy = staticmethod(create_sync_strategy)
    create_async_strategy = staticmethod(create_async_strategy)
    create_half_async_strategy = staticmethod(create_half_async_strategy)
    create_geo_strategy = staticmethod(create_geo_strategy)


def _create(mode: DistributedMode, fields: StrategyFields, **of_config: Any) -> DistributedStrategy:
    config = _config_for(mode, fields.get("transpiler") or DistributeTranspilerConfig())
    fields["transpiler"] = replace(config, **of_config)
    return DistributedStrategy(sync_mode=mode is DistributedMode.SYNC, **fields)


def _config_for(mode: DistributedMode, config: DistributeTranspilerConfig) -> DistributeTranspilerConfig:
    """Return the config itself if it requests the given mode, or else a copy that does."""
    return config if config.asks_for() is mode else replace(config, **_FIELDS_OF_MODE[mode])


def _said(mode: DistributedMode | bool) -> str:
    if isinstance(mode, DistributedMode):
        return mode.name.lower()
    return f"{'synchronous' if mode else 'asynchronous'} training"


def _unknown(name: str) -> str:
    known = list(_CHECKS)
    of_config = [each.name for each in fields(DistributeTranspilerConfig)]
    if name in of_config:
        return (
            f"DistributedStrategy has no field {name!r}, but its config has: set strategy.transpiler.{name}, "
            "or pass a DistributeTranspilerConfig as the strategy"
        )
    if name in ORIGINALS:
        return f"DistributedStrategy has no field {name!r}: {ORIGINALS[name]}"
    return f"DistributedStrategy has no field {name!r}{meant(name, known)}; its fields are {', '.join(known)}"


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"strategy.{name} is {value!r}; expected True or False")


def _check_bool_or_none(name: str, value: object) -> None:
    if value is not None:
        _check_bool(name, value)


def _check_one_of(*choices: object, expected: str = "") -> Callable[[str, object], None]:
    wanted = expected or " or ".join(map(str, choices))

    def check(name: str, value: object) -> None:
        if value not in choices:
            raise ConfigurationError(f"strategy.{name} is {value!r}; expected {wanted}")

    return check


def _check_own_mode(name: str, value: object) -> None:
    if value is not None and not isinstance(getattr(value, "programs", None), DistributedMode):
        hint = "; Paddle's mode is strategy.transpiler.mode" if isinstance(value, str) else ""
        raise ConfigurationError(
            f"strategy.{name} is {value!r}; expected an instance of a subclass of "
            f"fleet.parameter_server.modes.Mode{hint}"
        )


def _check_clip(name: str, value: object) -> None:
    if value is not None:
        check_grad_clip(f"strategy.{name}", value)


def _check_kind(kind: type) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(
                f"strategy.{name} is {value!r}; expected a fleet.{kind.__name__} or None"
            )

    return check


def _check_config(name: str, value: object) -> None:
    if not isinstance(value, DistributeTranspilerConfig):
        raise ConfigurationError(f"strategy.{name} is {value!r}; expected a DistributeTranspilerConfig")


_CHECKS: Final[dict[str, Callable[[str, object], None]]] = {
    "sync_mode": _check_bool_or_none,
    "mode": _check_own_mode,
    "overlap": _check_bool_or_none,
    "cross_step": _check_bool,
    "server_kernels": _check_one_of("default", "fused"),
    "transport": _check_one_of("auto", "tcp", "shared_memory"),
    "wire_dtype": _check_one_of(
        None, "bfloat16", "float16", expected="'bfloat16', 'float16', or None for the tensors' own dtype"
    ),
    "local_sgd": _check_kind(LocalSGD),
    "power_sgd": _check_kind(PowerSGD),
    "broadcast_buffers": _check_bool,
    "grad_clip": _check_clip,
    "non_finite": _check_one_of("warn", "stop", "skip", expected="warn, stop or skip"),
    "transpiler": _check_config,
}
