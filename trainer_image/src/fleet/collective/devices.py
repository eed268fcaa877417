"""Which devices a job's trainers have, and what carries their tensors. Pure: facts in, a decision out.

NCCL carries CUDA tensors where each trainer has a GPU of its own; it refuses two trainers on one. gloo
carries all others, CUDA tensors through the memory of the host: so several processes may train on the CPU,
or even share a GPU, whatever the machine has.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fleet.errors import ConfigurationError

__all__ = ["Facts", "backend_of", "difference", "gpu_number", "samples", "why_not_nccl"]


@dataclass(frozen=True)
class Facts:
    """What a trainer says of itself before the trainers connect.

    Attributes
    ----------
    torch, nccl : str
        Versions; `nccl` is empty where there is no NCCL, or no GPU.
    gpu : str
        What no other GPU is called; empty where this trainer has none of its own.
    model : str
        The GPU's product name.
    """

    torch: str
    nccl: str = ""
    gpu: str = ""
    model: str = ""

    def to_text(self) -> str:
        """Return this as `from_text` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Facts":
        """Return what `to_text` wrote."""
        return cls(**json.loads(text))


def gpu_number(environ: Mapping[str, str], count: int) -> int | None:
    """Return which of `count` visible GPUs is this process's; None where it has none of its own.

    Raises
    ------
    ConfigurationError
        ``FLAGS_selected_gpus`` names none of them, or ``LOCAL_RANK`` is no number.
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


def difference(everybodys: Mapping[int, Facts], rank: int) -> tuple[int, str] | None:
    """Return who differs from trainer `rank` in what must be equal, and a clause that says in what."""
    ours = everybodys[rank]
    for other, theirs in everybodys.items():
        if theirs.torch != ours.torch:
            return other, f"has PyTorch {theirs.torch} where this trainer, {rank}, has {ours.torch}"
        if ours.nccl and theirs.nccl and theirs.nccl != ours.nccl and not why_not_nccl(everybodys):
            return other, f"has NCCL {theirs.nccl} where this trainer, {rank}, has {ours.nccl}"
    return None


def samples(everybodys: Mapping[int, Facts]) -> dict[int, Facts]:
    """Return the facts of a few trainers by which each decides as by everybody's, if it adds its own.

    They are the first trainers with each version and model, and those because of which NCCL cannot be used:
    few, where each of many GPUs has a name of its own.
    """
    first = {(facts.torch, facts.nccl, facts.model): rank for rank, facts in sorted(everybodys.items())[::-1]}
    return {rank: everybodys[rank] for rank in sorted({*first.values(), *_without_own_gpu(everybodys)})}


def why_not_nccl(everybodys: Mapping[int, Facts]) -> str:
    """Return why NCCL cannot carry the trainers' CUDA tensors; empty if it can."""
    match _without_own_gpu(everybodys):
        case [rank]:
            return f"trainer {rank} has no GPU of its own"
        case [owner, rank]:
            return f"the trainers {owner} and {rank} have the same GPU"
    return ""


def _without_own_gpu(everybodys: Mapping[int, Facts]) -> list[int]:
    """Return the first trainer without a GPU, or the first two with the same one."""
    owners: dict[str, int] = {}
    for rank, facts in everybodys.items():
        if not facts.gpu:
            return [rank]
        if facts.gpu in owners:
            return [owners[facts.gpu], rank]
        owners[facts.gpu] = rank
    return []


def backend_of(everybodys: Mapping[int, Facts]) -> str:
    """Return the backend for `torch.distributed`."""
    return "gloo" if why_not_nccl(everybodys) else "cpu:gloo,cuda:nccl"
