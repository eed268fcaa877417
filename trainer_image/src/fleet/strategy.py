"""The strategy: how a job trains, as far as the script decides it."""

from dataclasses import dataclass, field, replace

from fleet.errors import ConfigurationError
from fleet.role_maker.variables import SYNC_MODES
from fleet.transpiler.config import DistributeTranspilerConfig

__all__ = ["DistributedStrategy"]

_KERNELS = ("default",)


@dataclass(frozen=True, kw_only=True)
class DistributedStrategy:
    """How a job trains. Immutable; every value is checked when it is made.

    Attributes
    ----------
    sync_mode : bool or None
        True for synchronous training. None takes what the job asks for (`FLEET_SYNC_MODE`).
    overlap : bool
        Send a gradient the moment it exists. False sends all of them in `optimizer.step()`, which
        allows gradients to be changed after the backward pass.
    cross_step : bool
        Wait for new values layer by layer in the next forward pass. Not supported yet.
    server_kernels : str
        ``default``: the user's own kernel flags on the servers.
    grad_clip : object
        Clip gradients on the servers. Not supported yet.
    transpiler : DistributeTranspilerConfig
        How parameters are cut into blocks and dispatched.

    Raises
    ------
    ConfigurationError
        A value that is unknown or not supported yet; the message names the field.
    """

    sync_mode: bool | None = None
    overlap: bool = True
    cross_step: bool = False
    server_kernels: str = "default"
    grad_clip: object = None
    transpiler: DistributeTranspilerConfig = field(default_factory=DistributeTranspilerConfig)

    def __post_init__(self) -> None:
        if self.sync_mode is not None:
            _check_bool("sync_mode", self.sync_mode)
        _check_bool("overlap", self.overlap)
        _check_bool("cross_step", self.cross_step)
        if self.sync_mode is False:
            raise ConfigurationError(_not_yet("sync_mode = False", "asynchronous training", "True"))
        if self.cross_step:
            raise ConfigurationError(_not_yet("cross_step = True", "waiting layer by layer", "False"))
        if self.server_kernels not in _KERNELS:
            raise ConfigurationError(
                f"strategy.server_kernels is {self.server_kernels!r}; expected {' or '.join(_KERNELS)}"
            )
        if self.grad_clip is not None:
            raise ConfigurationError(
                _not_yet(f"grad_clip = {self.grad_clip!r}", "clipping gradients on the servers", "None")
            )
        if not isinstance(self.transpiler, DistributeTranspilerConfig):
            raise ConfigurationError(
                f"strategy.transpiler is {self.transpiler!r}; expected a DistributeTranspilerConfig"
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
            With a `sync_mode` that is not None.

        Raises
        ------
        ConfigurationError
            The job asks for a mode that does not run yet, and the strategy for none.
        """
        if self.sync_mode is not None:
            return self
        if job_sync_mode not in SYNC_MODES:
            raise ConfigurationError(
                f"FLEET_SYNC_MODE is {job_sync_mode!r}; expected one of {', '.join(SYNC_MODES)}"
            )
        if job_sync_mode != "Sync":
            raise ConfigurationError(
                f"FLEET_SYNC_MODE is {job_sync_mode!r}, which does not run yet; use Sync (spec.syncMode of a "
                "FleetJob), or set strategy.sync_mode = True"
            )
        return replace(self, sync_mode=True)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"strategy.{name} is {value!r}; expected True or False")


def _not_yet(setting: str, what: str, instead: str) -> str:
    return f"strategy.{setting}: {what} is not supported yet; use {instead}"
