"""The steps that a trainer has made, so that the others notice when one makes another. Pure.

Every trainer steps its own copy of the model. The copies stay equal as long as all step after the same
averages, with the same hyper-parameters. So the steps are boiled down to one number, which travels with the
gradients; where numbers differ, the trainers compare the last steps themselves.
"""

import json
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fleet.program.optimizers import KERNEL_FLAGS

if TYPE_CHECKING:
    import torch

__all__ = ["Account", "History", "Step", "difference", "hyper_parameters"]

_RECENT: Final = 16
"""How many steps are remembered: more than are made before a difference is found."""
_MET: Final = (
    "expected the same on every trainer, as each steps its own copy of the model: give all the same "
    "hyper-parameters, and a scheduler that follows a metric the metric of all (fleet.all_reduce_worker)"
)
_MADE: Final = (
    "expected every trainer to step after the same averages: decide from numbers of all trainers "
    "(fleet.all_reduce_worker) whether to skip a step"
)

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Step:
    """One ``optimizer.step()``: how many averages came before it, and each param group's options."""

    averages: int
    groups: Groups


@dataclass(frozen=True)
class Account:
    """How many steps a trainer has made, their digest, and the last of them."""

    count: int
    digest: int
    recent: Sequence[Step]

    def to_text(self) -> str:
        """Return this as `from_text` reads it."""
        recent = [[step.averages, step.groups] for step in self.recent]
        return json.dumps([self.count, self.digest, recent])

    @classmethod
    def from_text(cls, text: str) -> "Account":
        """Return what `to_text` wrote."""
        count, digest, recent = json.loads(text)
        return cls(count, digest, [Step(*step) for step in recent])


class History:
    """The steps of one optimizer.

    Attributes
    ----------
    digest : int
        Of all steps; 32 bits.
    """

    def __init__(self) -> None:
        self.digest = 0
        self._count = 0
        self._recent: deque[Step] = deque(maxlen=_RECENT)

    def add(self, step: Step) -> None:
        """Note one more step."""
        self._count += 1
        self._recent.append(step)
        self.digest = zlib.crc32(f"{step.averages} {step.groups}".encode(), self.digest)

    @property
    def account(self) -> Account:
        """What the others are told where digests differ."""
        return Account(self._count, self.digest, tuple(self._recent))


def hyper_parameters(optimizer: "torch.optim.Optimizer") -> list[dict[str, Any]]:
    """Return what must be the same on every trainer, for each param group.

    Options that choose a kernel follow the device, and entries that are none of the optimizer's options (a
    scheduler's, the script's) change no step.
    """
    names = [name for name in optimizer.defaults if name not in KERNEL_FLAGS]
    return [{name: _plain(group[name]) for name in names} for group in optimizer.param_groups]


def difference(everybodys: Mapping[int, Account], rank: int) -> tuple[int, str] | None:
    """Return who has stepped otherwise than trainer `rank`, and a clause that says how, and what to do."""
    ours = everybodys[rank]
    for other, theirs in everybodys.items():
        if theirs == ours:
            continue
        first = max(_known_from(theirs), _known_from(ours))
        clause = _other_number(theirs, ours, rank, first) or _other_options(theirs, ours, rank, first)
        return other, clause or (
            f"has made {theirs.count} steps, and not the same as this trainer, {rank}, which has made "
            f"{ours.count}; {_MADE}"
        )
    return None


def _known_from(account: Account) -> int:
    """Return the number of averages from which on all of an account's steps are known."""
    return 0 if account.count == len(account.recent) else account.recent[0].averages + 1


def _other_number(theirs: Account, ours: Account, rank: int, first: int) -> str:
    found, expected = (Counter(step.averages for step in each.recent) for each in (theirs, ours))
    for averages in sorted(found.keys() | expected.keys()):
        if averages >= first and found[averages] != expected[averages]:
            return (
                f"made {_times(found[averages])} {_after(averages)} where this trainer, {rank}, made "
                f"{_times(expected[averages])}; {_MADE}"
            )
    return ""


def _other_options(theirs: Account, ours: Account, rank: int, first: int) -> str:
    known = ([step for step in each.recent if step.averages >= first] for each in (theirs, ours))
    for found, expected in zip(*known, strict=True):
        for number, (group, other) in enumerate(zip(found.groups, expected.groups, strict=False)):
            for name, value in group.items():
                if value != other.get(name):
                    return (
                        f"stepped with {name}={value} in param group {number} {_after(found.averages)} where "
                        f"this trainer, {rank}, stepped with {name}={other.get(name)}; {_MET}"
                    )
    return ""


def _after(averages: int) -> str:
    if averages == 0:
        return "before any gradients were averaged"
    return f"after the average of step {averages - 1}'s gradients"


def _times(number: int) -> str:
    return {0: "no optimizer.step()", 1: "one optimizer.step()"}.get(number, f"{number} optimizer.step()s")


def _plain(value: object) -> Any:
    """Return an option as JSON has it; processors may differ in the last digits of a scheduler's."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and not getattr(value, "is_cuda", False):
        return _plain(value.item())  # type: ignore[attr-defined]
    return type(value).__name__  # to read it from a GPU would wait for that
