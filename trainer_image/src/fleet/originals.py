"""What the original has and ours has not: fields of a strategy, arguments of executors. And what instead.

The strategy's are those of `DistributedDataParallel`, too.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from fleet.errors import ConfigurationError

__all__ = ["MINIMIZE", "ORIGINALS", "PARALLEL_EXECUTOR", "PARALLEL_RUN", "RUN", "Argument", "check_arguments"]

_SHOWN: Final = 80
"""How long what was given may be for it to be shown; parameters are longer."""
_log = logging.getLogger(__name__)

_LOCAL = "set strategy.local_sgd = fleet.LocalSGD(k_steps=8); collective training only"
_FIXED = (
    "its k would follow the loss, which an optimizer is not told; "
    "set strategy.local_sgd = fleet.LocalSGD(k_steps=8, begin_step=30)"
)
_RECOMPUTED = "use torch.utils.checkpoint in the model"
_AUTOCAST = "run the forward pass under torch.autocast"
_UNUSED = "trainers tell one another in every pass which parameters they have used; leave it out"
_BUCKETS = "gradients travel in torch's buckets, and are views of them; leave it out"
_EXECUTED = "PyTorch runs the model, and has settings of its own"
ORIGINALS: Final[Mapping[str, str]] = {
    "use_local_sgd": _LOCAL,
    "local_sgd_config": _LOCAL,
    "localsgd": _LOCAL,
    "localsgd_configs": _LOCAL,
    "adaptive_localsgd": _FIXED,
    "adaptive_localsgd_configs": _FIXED,
    "use_dgc": "no gradient travels in parts; wire_dtype='bfloat16' halves it, power_sgd makes it narrow",
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
    "sync_batch_norm": "give torch.nn.SyncBatchNorm.convert_sync_batchnorm the model, on GPUs",
    "exec_strategy": _EXECUTED,
    "build_strategy": _EXECUTED,
}
"""Fields that others' strategies have, and what to use instead."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One of the original's arguments: its default, and why another value is refused, or changes nothing."""

    default: object
    text: str
    refused: bool = True


_SCOPE = Argument(None, "values are in the model, and there is no other scope")
_RETURN_NUMPY = Argument(True, "what is fetched is an array, of which torch.from_numpy makes a tensor")
_NAMES = "what is fed and fetched goes through no variables of that name"
PARALLEL_EXECUTOR: Final[Mapping[str, Argument]] = {
    "exec_strategy": Argument(None, _EXECUTED),
    "build_strategy": Argument(None, _EXECUTED),
    "scope": _SCOPE,
}
"""Of its constructor."""
PARALLEL_RUN: Final[Mapping[str, Argument]] = {"return_numpy": _RETURN_NUMPY}
RUN: Final[Mapping[str, Argument]] = {
    "feed_var_name": Argument("feed", _NAMES, refused=False),
    "fetch_var_name": Argument("fetch", _NAMES, refused=False),
    "scope": _SCOPE,
    "return_numpy": _RETURN_NUMPY,
    "use_program_cache": Argument(False, "a program that has run needs no preparing", refused=False),
    "return_merged": Argument(True, "one process has one device, whose values are returned"),
    "use_prune": Argument(False, "each run of a training program is a whole step"),
}
"""Of `Executor.run`."""
MINIMIZE: Final[Mapping[str, Argument]] = {
    "startup_program": Argument(
        None,
        "the startup program is made with the program: run fleet.startup_program after minimize(loss_fn)",
    ),
    "parameter_list": Argument(
        None, "the optimizer says what is trained: give torch.optim's class those parameters alone"
    ),
    "no_grad_set": Argument(
        None, "the module says what is not trained: call requires_grad_(False) of those parameters"
    ),
}
"""Of ``minimize``."""


def check_arguments(call: str, given: Mapping[str, object], known: Mapping[str, Argument]) -> None:
    """Take the original's arguments that change nothing, with a line in the log, and refuse the others.

    Parameters
    ----------
    call : str
        What they were given to, for messages.
    given : mapping
        By name.
    known : mapping
        Those that the original has and `call` has not.

    Raises
    ------
    TypeError
        The original has no such argument either.
    ConfigurationError
        A value asks for what is not carried out; the message names the argument.
    """
    for name, value in given.items():
        if (argument := known.get(name)) is None:
            raise TypeError(f"{call} got an unexpected keyword argument {name!r}")
        if value is argument.default or value == argument.default:
            continue
        if argument.refused:
            shown = text if len(text := repr(value)) <= _SHOWN else f"a {type(value).__name__}"
            raise ConfigurationError(
                f"{call}: {name} is {shown}, and {argument.text}; leave it at {argument.default!r}"
            )
        _tell(call, name, argument.text)


@cache
def _tell(call: str, name: str, text: str) -> None:
    """Say once in a process that an argument changes nothing."""
    _log.info("%s: %s changes nothing: %s", call, name, text)
