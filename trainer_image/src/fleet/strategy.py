"""The strategy: how a job trains, as far as the script decides it.

The mode follows from what says something about it: a `mode` object of the script's own, `sync_mode`, or the
transpiler config's fields. Where two of them contradict each other the strategy cannot be made; where none
says anything, the job decides (`FLEET_SYNC_MODE`).
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from fleet.errors import ConfigurationError, TranspileError
from fleet.program.clip import GradClip, check_grad_clip
from fleet.role_maker.variables import SYNC_MODES
from fleet.transpiler.config import DistributedMode, DistributeTranspilerConfig, TrainingMode

__all__ = [
    "DistributedStrategy",
    "StrategyFactory",
    "create_async_strategy",
    "create_geo_strategy",
    "create_half_async_strategy",
    "create_sync_strategy",
]

_KERNELS = ("default", "fused")
_TRANSPORTS = ("auto", "tcp", "shared_memory")
_WIRE_DTYPES = (None, "bfloat16")
_MODE_OF_JOB: Final = dict(zip(SYNC_MODES, DistributedMode, strict=True))
_FIELDS_OF_MODE: Final[dict[DistributedMode, dict[str, Any]]] = {
    DistributedMode.SYNC: {"sync_mode": True, "runtime_split_send_recv": False},
    DistributedMode.ASYNC: {"sync_mode": False, "runtime_split_send_recv": True},
    DistributedMode.HALF_ASYNC: {"sync_mode": False, "half_async": True},
    DistributedMode.GEO: {"sync_mode": False, "geo_sgd_mode": True},
}


@dataclass(frozen=True, kw_only=True)
class DistributedStrategy:
    """How a job trains. Immutable; every value is checked when it is made.

    Attributes
    ----------
    sync_mode : bool or None
        True for synchronous training, False for an asynchronous mode: the one that `transpiler` asks for,
        else half-async. None leaves it to `transpiler`, and then to the job (`FLEET_SYNC_MODE`).
    mode : TrainingMode or None
        A mode of your own, an instance of a subclass of `fleet.parameter_server.modes.Mode`.
    overlap : bool
        Send a gradient the moment it exists. False sends all of them in `optimizer.step()`, which
        allows gradients to be changed after the backward pass.
    cross_step : bool
        Wait for new values layer by layer in the next forward pass, and not in `optimizer.step()`.
        Parameters must then be read through the modules that own them; the model is to be given to
        `distributed_optimizer`. Synchronous and asynchronous training only; half-async and GEO do not wait.
    server_kernels : str
        ``default``: the servers step with the user's own kernel flags, and every bit is that of one process.
        ``fused``: with the fused kernels of the optimizer's class, which pass over memory once, and round
        otherwise.
    transport : str
        How gradients and values travel between a trainer and a parameter server. ``auto``: through memory
        that both share where they run on one host as one user, else over TCP. ``tcp``: always over TCP.
        ``shared_memory``: as ``auto``, but a server that is elsewhere is an error that names it.
    wire_dtype : str or None
        ``bfloat16``: gradients and values of longer floating-point numbers travel as bfloat16, over TCP. The
        servers keep and step the parameters' own dtype. None: everything travels as it is.
    grad_clip : ClipGradByValue, ClipGradByNorm, ClipGradByGlobalNorm or None
        Clip the gradients on the servers, after they were averaged over the trainers. Synchronous training
        only.
    transpiler : DistributeTranspilerConfig
        How parameters are cut into blocks and dispatched.

    Raises
    ------
    ConfigurationError
        A value that is unknown or not supported yet; the message names the field.
    """

    sync_mode: bool | None = None
    mode: TrainingMode | None = None
    overlap: bool = True
    cross_step: bool = False
    server_kernels: str = "default"
    transport: str = "auto"
    wire_dtype: str | None = None
    grad_clip: GradClip | None = None
    transpiler: DistributeTranspilerConfig = field(default_factory=DistributeTranspilerConfig)

    def __post_init__(self) -> None:
        if self.sync_mode is not None:
            _check_bool("sync_mode", self.sync_mode)
        _check_bool("overlap", self.overlap)
        _check_bool("cross_step", self.cross_step)
        if self.server_kernels not in _KERNELS:
            raise ConfigurationError(
                f"strategy.server_kernels is {self.server_kernels!r}; expected {' or '.join(_KERNELS)}"
            )
        if self.transport not in _TRANSPORTS:
            raise ConfigurationError(
                f"strategy.transport is {self.transport!r}; expected {' or '.join(_TRANSPORTS)}"
            )
        if self.wire_dtype not in _WIRE_DTYPES:
            raise ConfigurationError(
                f"strategy.wire_dtype is {self.wire_dtype!r}; expected 'bfloat16', or None: as they are kept"
            )
        if self.wire_dtype is not None and self.transport == "shared_memory":
            raise ConfigurationError(
                f"strategy.wire_dtype is {self.wire_dtype!r}, and strategy.transport is 'shared_memory', in "
                "which nothing travels; leave one of them at its default"
            )
        if self.grad_clip is not None:
            check_grad_clip("strategy.grad_clip", self.grad_clip)
        if not isinstance(self.transpiler, DistributeTranspilerConfig):
            raise ConfigurationError(
                f"strategy.transpiler is {self.transpiler!r}; expected a DistributeTranspilerConfig"
            )
        if self.wire_dtype is not None and self.transpiler.enable_dc_asgd:
            raise ConfigurationError(
                f"strategy.wire_dtype is {self.wire_dtype!r}, and transpiler.enable_dc_asgd compensates for "
                "the delay of values that are not rounded; leave one of them at its default"
            )
        self._check_mode()

    def _check_mode(self) -> None:
        """Refuse a strategy whose parts ask for different modes."""
        try:
            asked = self.transpiler.asks_for()
        except TranspileError as error:
            raise ConfigurationError(f"strategy.transpiler: {error}") from error
        if self.mode is not None:
            if not isinstance(getattr(self.mode, "programs", None), DistributedMode):
                raise ConfigurationError(
                    f"strategy.mode is {self.mode!r}; expected an instance of a subclass of "
                    "fleet.parameter_server.modes.Mode"
                )
            for name, other in (("sync_mode", self.sync_mode), ("transpiler", asked)):
                if other is not None:
                    raise ConfigurationError(
                        f"strategy.mode is {self.mode.name!r}, and strategy.{name} asks for {_said(other)}; "
                        f"leave {name} at its default where a mode is given"
                    )
        if self.sync_mode is True and asked not in (None, DistributedMode.SYNC):
            raise ConfigurationError(
                f"strategy.sync_mode is True, and strategy.transpiler asks for {_said(asked)}; "
                "set sync_mode = False, or leave the config's fields of the mode at their defaults"
            )
        if self.sync_mode is False and asked is DistributedMode.SYNC:
            raise ConfigurationError(
                "strategy.sync_mode is False, and strategy.transpiler asks for sync (completely_not_async = "
                "True); set one of them to the other"
            )

    def resolved(self, job_sync_mode: str) -> "DistributedStrategy":
        """Return this strategy with what it leaves open taken from the job.

        Parameters
        ----------
        job_sync_mode : str
            `Role.sync_mode`, which is `FLEET_SYNC_MODE`.

        Returns
        -------
        DistributedStrategy
            With a `sync_mode` that is not None and a `transpiler` that says the mode, unless `mode` does.

        Raises
        ------
        ConfigurationError
            The job asks for a mode that there is not.
        """
        if job_sync_mode not in SYNC_MODES:
            raise ConfigurationError(
                f"FLEET_SYNC_MODE is {job_sync_mode!r}; expected one of {', '.join(SYNC_MODES)}"
            )
        if self.mode is not None:
            return self
        mode = self.transpiler.asks_for()
        if mode is None and self.sync_mode is None:
            mode = _MODE_OF_JOB[job_sync_mode]
        elif mode is None:
            mode = DistributedMode.SYNC if self.sync_mode else DistributedMode.HALF_ASYNC
        return replace(
            self,
            sync_mode=mode is DistributedMode.SYNC,
            transpiler=_config_for(mode, self.transpiler),
        )


def create_sync_strategy(**fields: Any) -> DistributedStrategy:
    """Return a strategy for synchronous training.

    Parameters
    ----------
    **fields
        As of `DistributedStrategy`, `transpiler` included: its fields of the mode are set here.
    """
    return _create(DistributedMode.SYNC, fields)


def create_async_strategy(**fields: Any) -> DistributedStrategy:
    """Return a strategy for asynchronous training, in which each gradient is applied when it comes.

    Parameters
    ----------
    **fields
        As of `create_sync_strategy`.
    """
    return _create(DistributedMode.ASYNC, fields)


def create_half_async_strategy(**fields: Any) -> DistributedStrategy:
    """Return a strategy for half-asynchronous training, in which trainers do not wait for servers either.

    Parameters
    ----------
    **fields
        As of `create_sync_strategy`.
    """
    return _create(DistributedMode.HALF_ASYNC, fields)


def create_geo_strategy(update_frequency: int = 100, **fields: Any) -> DistributedStrategy:
    """Return a strategy for GEO: trainers step by themselves and exchange what has changed.

    Parameters
    ----------
    update_frequency : int
        After how many steps.
    **fields
        As of `create_sync_strategy`.
    """
    return _create(DistributedMode.GEO, fields, geo_sgd_need_push_nums=update_frequency)


class StrategyFactory:
    """The four strategies under the original's name."""

    create_sync_strategy = staticmethod(create_sync_strategy)
    create_async_strategy = staticmethod(create_async_strategy)
    create_half_async_strategy = staticmethod(create_half_async_strategy)
    create_geo_strategy = staticmethod(create_geo_strategy)


def _create(mode: DistributedMode, fields: dict[str, Any], **of_config: Any) -> DistributedStrategy:
    config = fields.pop("transpiler", None)
    config = _config_for(mode, config if config is not None else DistributeTranspilerConfig())
    return DistributedStrategy(
        sync_mode=mode is DistributedMode.SYNC, transpiler=replace(config, **of_config), **fields
    )


def _config_for(mode: DistributedMode, config: DistributeTranspilerConfig) -> DistributeTranspilerConfig:
    """Return a config that asks for a mode, unless it does so already."""
    return config if config.asks_for() is mode else replace(config, **_FIELDS_OF_MODE[mode])


def _said(mode: DistributedMode | bool | None) -> str:
    if isinstance(mode, DistributedMode):
        return mode.name.lower()
    return f"{'synchronous' if mode else 'asynchronous'} training"


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"strategy.{name} is {value!r}; expected True or False")
