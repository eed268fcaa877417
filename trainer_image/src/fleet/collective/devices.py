"""The devices of a job's trainers: selecting the backend, tracking a GPU's progress, and attributing errors.

NCCL carries CUDA tensors if each trainer has its own GPU, because NCCL refuses two trainers on one GPU. gloo
carries all other tensors, and CUDA tensors through host memory otherwise. Several processes can therefore
train on the CPU, or share a GPU, on any machine.
"""

import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from fleet.errors import ConfigurationError

__all__ = [
    "Facts",
    "Mark",
    "Marks",
    "backend_of",
    "difference",
    "gpu_number",
    "is_capturing",
    "is_from_script",
    "local_facts",
    "own_fault",
    "reason_of",
    "samples",
    "why_not_nccl",
]

_MARKS: Final = 64
"""The number of marks that can be in use at the same time; streams may reach their marks in any order."""
_BY_KERNEL: Final = "CUDA_LAUNCH_BLOCKING=1 shows which operation failed"
_OWN_FAULTS: Final = {
    "out of memory": "make the batch or the model smaller, or check which other processes use this device",
    "CUDA error": _BY_KERNEL,
    "ncclUnhandledCudaError": _BY_KERNEL,
    "ncclInvalid": "NCCL_DEBUG=INFO shows what NCCL refuses",
}
"""The advice for each text that identifies an error as this trainer's own."""
_TRANSPORT: Final = ("gloo", "nccl", "connect", "socket", "broken pipe", "timed out", "timeout", "abort")
_OURS: Final = tuple(f"{each}{os.sep}" for each in (Path(torch.__file__).parent, Path(__file__).parents[1]))
"""The folders of torch and fleet; code in any other folder counts as the script's."""


@dataclass(frozen=True)
class Facts:
    """A trainer's library versions and GPU, which trainers compare before they connect.

    Attributes
    ----------
    torch, nccl : str
        Versions; `nccl` is empty without NCCL or a GPU.
    gpu : str
        The GPU's UUID; empty if this trainer has no GPU of its own.
    model : str
        The GPU's product name.
    """

    torch: str
    nccl: str = ""
    gpu: str = ""
    model: str = ""

    def to_text(self) -> str:
        """Return the facts as JSON, which `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Facts":
        """Parse the result of `to_text`."""
        return cls(**json.loads(text))


def local_facts(environ: Mapping[str, str]) -> Facts:
    """Select this trainer's GPU as the current device, if it has one; return the trainer's facts."""
    version = torch.__version__.partition("+")[0]  # the rest identifies the build
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return Facts(version)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    number = gpu_number(environ, torch.cuda.device_count())
    if number is None:
        return Facts(version, nccl)
    if number:  # the first GPU is already current, and setting it would create a context that may stay unused
        torch.cuda.set_device(number)
    properties = torch.cuda.get_device_properties(number)
    return Facts(version, nccl, str(properties.uuid), properties.name)


def gpu_number(environ: Mapping[str, str], count: int) -> int | None:
    """Return the index of this process's own GPU among `count` visible GPUs, or None if it has none.

    Raises
    ------
    ConfigurationError
        ``FLAGS_selected_gpus`` names none of the visible GPUs, or ``LOCAL_RANK`` is not a number.
    """
    selected = environ.get("FLAGS_selected_gpus")
    text = selected or environ.get("LOCAL_RANK") or "0"
    if text.isascii() and text.isdigit():
        if int(text) < count:
            return int(text)
        if not selected:  # more processes than GPUs
            return None
    raise ConfigurationError(
        f"the GPU of this process (FLAGS_selected_gpus, else LOCAL_RANK) is {text!r}; "
        f"expected a number from 0 to {count - 1}, for {count} visible GPUs"
    )


def difference(facts: Mapping[int, Facts], rank: int) -> tuple[int, str] | None:
    """Return the first trainer whose versions differ from trainer `rank`'s, with the difference, or None."""
    ours = facts[rank]
    for other, theirs in facts.items():
        if theirs.torch != ours.torch:
            return other, f"has PyTorch {theirs.torch} where this trainer, {rank}, has {ours.torch}"
        if ours.nccl and theirs.nccl and theirs.nccl != ours.nccl and not why_not_nccl(facts):
            return other, f"has NCCL {theirs.nccl} where this trainer, {rank}, has {ours.nccl}"
    return None


def samples(facts: Mapping[int, Facts]) -> dict[int, Facts]:
    """Return a small subset of the trainers' facts that leads to the same decisions as the full set.

    These are the first trainers with each version and GPU model, and those that rule out NCCL. They are few
    even if each of many GPUs has its own UUID.
    """
    # In reverse order, so that the lowest rank of each kind overwrites the others.
    first = {(each.torch, each.nccl, each.model): rank for rank, each in sorted(facts.items())[::-1]}
    return {rank: facts[rank] for rank in sorted({*first.values(), *_without_own_gpu(facts)})}


def why_not_nccl(facts: Mapping[int, Facts]) -> str:
    """Return why NCCL cannot carry the trainers' CUDA tensors, or an empty string if it can."""
    match _without_own_gpu(facts):
        case [rank]:
            return f"trainer {rank} has no GPU of its own"
        case [owner, rank]:
            return f"the trainers {owner} and {rank} have the same GPU"
    return ""


def _without_own_gpu(facts: Mapping[int, Facts]) -> list[int]:
    """Return the first trainer without a GPU, or the first two that share one; otherwise an empty list."""
    owners: dict[str, int] = {}
    for rank, each in facts.items():
        if not each.gpu:
            return [rank]
        if each.gpu in owners:
            return [owners[each.gpu], rank]
        owners[each.gpu] = rank
    return []


def backend_of(facts: Mapping[int, Facts]) -> str:
    """Return the `torch.distributed` backend for these trainers."""
    return "gloo" if why_not_nccl(facts) else "cpu:gloo,cuda:nccl"


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured, during which nothing can be read from the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Mark:
    """A point in a CUDA stream; any thread can check, without a CUDA call, whether the GPU has reached it.

    Querying a `torch.cuda.Event` is a CUDA call: it creates a context on the thread's current device, and may
    abort the capture of a graph in another thread. A mark instead has the GPU write a number to host memory
    when it reaches the point.

    Parameters
    ----------
    number : int
    device : torch.device
        Its current stream reaches the mark.
    memory : Tensor
        One element of host memory, which initially holds a smaller number.
    """

    def __init__(self, number: int, device: torch.device, memory: torch.Tensor) -> None:
        self._number = number
        self._device = device
        self._memory = memory

    def put(self) -> None:
        """Enqueue the mark after all work that is already in the stream."""
        number = torch.full_like(self._memory, self._number, device=self._device)
        self._memory.copy_(number, non_blocking=True)

    def reached(self) -> bool:
        """Return whether the stream has reached the mark; callable from any thread."""
        # Not `==`: a later mark may have reused this slot, and then this one has been reached as well.
        return int(self._memory.item()) >= self._number


class Marks:
    """A source of marks for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(_MARKS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._count = 0

    def next(self) -> Mark:
        """Return a mark that no stream has reached."""
        self._count += 1
        slot = self._count % _MARKS
        return Mark(self._count, self._device, self._memory[slot : slot + 1])


def own_fault(error: BaseException) -> str:
    """Return advice if this trainer's own device failed; an empty string if another trainer may be the cause.

    torch raises both kinds of errors from the same calls, because an error of this device may come from any
    earlier kernel.
    """
    text = str(error)
    for mark, help_ in _OWN_FAULTS.items():
        if mark in text:
            return help_
    return _BY_KERNEL if isinstance(error, torch.AcceleratorError) else ""


def is_from_script(error: BaseException) -> bool:
    """Return True if the script's code raised the error, for example in a hook that runs during `backward()`.

    Parameters
    ----------
    error : BaseException
        Caught around the wait, so that its traceback contains all calls in the wait.
    """
    text = str(error).lower()
    # gloo reports a lost connection as a plain RuntimeError. Only the text distinguishes this error from one
    # in a hook of the script.
    if isinstance(error, dist.DistError) or any(word in text for word in _TRANSPORT):
        return False
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return any(not file.startswith(("<", *_OURS)) for file in files)


def reason_of(error: BaseException) -> str:
    """Return the most useful line of an error: NCCL's last logged error if present, else the first line."""
    text = str(error).strip()
    return (text.partition("Last error:\n")[2] or text).partition("\n")[0]
