"""How many GPUs the workers of this node will see: as many workers are started where nobody says a number."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet.errors import ConfigurationError

__all__ = ["ask_torch", "has_device_files", "visible_gpus"]

ASK_SECONDS = 120.0
_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""Of NVIDIA's driver, of its driver in WSL, of AMD's."""
_QUESTION = "import torch; print(torch.cuda.device_count())"


def visible_gpus(
    environ: Mapping[str, str], has_device: Callable[[], bool], ask: Callable[[Mapping[str, str]], int]
) -> int:
    """Count the GPUs that a worker would see.

    Torch itself is asked, in a process of its own, because only CUDA knows what ``CUDA_VISIBLE_DEVICES``
    comes to (UUIDs, MIG slices, an index that is not there). Where there can be no GPU nobody is asked: torch
    takes seconds to import.

    Parameters
    ----------
    environ : mapping
        The workers' environment.
    has_device : callable
        Whether this machine shows the files of a GPU's driver.
    ask : callable
        Returns what torch counts in an environment.
    """
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return 0 if hidden or not has_device() else ask(environ)


def has_device_files(devices: Path = Path("/dev")) -> bool:
    """Whether a GPU's driver has put its files among the devices of this machine, or of this container."""
    return any(next(devices.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def ask_torch(environ: Mapping[str, str]) -> int:
    """Return how many GPUs torch counts in a process with this environment.

    Raises
    ------
    ConfigurationError
        It gives no number; the message says what to do instead.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _QUESTION],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        )
        return int(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        last = reason.strip().splitlines()[-1:] or [type(error).__name__]
        raise ConfigurationError(
            f"torch does not say how many GPUs this node has: {last[0]}; say it with --worker_num or "
            "--selected_gpus"
        ) from error
