"""Arguments of Paddle's calls that fleet refuses or ignores, with the reasons."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from fleet.errors import ConfigurationError

__all__ = [
    "FROM_DATASET",
    "MINIMIZE",
    "PARALLEL_EXECUTOR",
    "RUN",
    "Argument",
    "check_arguments",
]

_SHOWN: Final = 80
"""The maximum length of a value that a message shows in full."""
_log = logging.getLogger(__name__)

_EXECUTED = "PyTorch runs the model, and has its own settings"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a Paddle call: its default, and why other values are refused or ignored."""

    default: object
    text: str
    refused: bool = True


_SCOPE = Argument(None, "values are in the model, and there is no other scope")
_NAMES = "fed and fetched values do not pass through a variable of that name"
PARALLEL_EXECUTOR: Final[Mapping[str, Argument]] = {
    "exec_strategy": Argument(None, _EXECUTED),
    "build_strategy": Argument(None, _EXECUTED),
    "scope": _SCOPE,
}
"""Arguments of the constructor of `ParallelExecutor`."""
RUN: Final[Mapping[str, Argument]] = {
    "feed_var_name": Argument("feed", _NAMES, refused=False),
    "fetch_var_name": Argument("fetch", _NAMES, refused=False),
    "scope": _SCOPE,
    "use_program_cache": Argument(False, "a program that has run needs no preparation", refused=False),
    "return_merged": Argument(True, "one process has one device, whose values are returned"),
    "use_prune": Argument(False, "each run of a training program is a whole step"),
}
"""Arguments of `Executor.run`."""
FROM_DATASET: Final[Mapping[str, Argument]] = {
    "scope": _SCOPE,
    "debug": Argument(False, "PyTorch's profiler measures operators", refused=False),
}
"""Arguments of `Executor.train_from_dataset`."""
MINIMIZE: Final[Mapping[str, Argument]] = {
    "startup_program": Argument(
        None,
        "the startup program is made with the program: run fleet.startup_program after minimize(loss_fn)",
    ),
    "parameter_list": Argument(
        None, "the optimizer determines what is trained: pass only these parameters to torch.optim's class"
    ),
    "no_grad_set": Argument(
        None, "the module determines what is not trained: call requires_grad_(False) on these parameters"
    ),
}
"""Arguments of ``minimize``."""


def check_arguments(call: str, given: Mapping[str, object], known: Mapping[str, Argument]) -> None:
    """Refuse Paddle arguments that are not supported; log the ones that have no effect.

    Parameters
    ----------
    call : str
        The name of the call, for messages.
    given : mapping
        The given arguments, by name.
    known : mapping
        The arguments that only Paddle has.

    Raises
    ------
    TypeError
        Paddle does not have this argument either.
    ConfigurationError
        A value requests something unsupported; the message names the argument.
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
    """Log once per process that an argument has no effect."""
    _log.info("%s: %s has no effect: %s", call, name, text)
