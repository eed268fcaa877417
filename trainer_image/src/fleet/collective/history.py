"""The steps that a trainer has made, so that the others notice when one makes another. Pure.

Every trainer steps its own copy of the model. Where gradients are averaged the copies stay equal as long as
all step after the same averages, with the same hyper-parameters; where parameters are, their mean is that of
copies that have made the same number of steps. So the steps are boiled down to one number, which travels with
what is averaged; where numbers differ, the trainers compare the last steps themselves.
"""

import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fleet.plan.optimizers import KERNEL_FLAGS

if TYPE_CHECKING:
    import torch

__all__ = ["Account", "History", "Step", "after_average", "after_steps", "difference", "hyper_parameters"]

_RECENT: Final = 16
"""How many steps are remembered: more than are made before a difference is found."""
_MET: Final = (
    "expected the same on every trainer, as each steps its own copy of the model: give all the same "
    "hyper-parameters, and a scheduler that follows a metric the metric of all (fleet.all_reduce_worker)"
)
_MADE: Final = (
    "expected the same steps on every trainer: decide from numbers of all trainers (fleet.all_reduce_worker) "
    "whether to skip a step"
)

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Step:
    """One ``optimizer.step()``, or gradients that were cleared instead.

    Attributes
    ----------
    before : int
        How many averages of gradients came before it; with LocalSGD, which has none, how many steps.
    groups : sequence of mapping, or None
        Each param group's options; None where no step was made.
    """

    before: int
    groups: Groups | None


@dataclass(frozen=True)
class Account:
    """How many steps a trainer has made or left out, their digest, and the last of them."""

    count: int
    digest: int
    recent: Sequence[Step]

    def to_text(self) -> str:
        """Return this as `from_text` reads it."""
        recent = [[step.before, step.groups] for step in self.recent]
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
        """Note one more step, or one left out."""
        self._count += 1
        self._recent.append(step)
        self.digest = zlib.crc32(f"{step.before} {step.groups}".encode(), self.digest)

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


def after_average(number: int) -> str:
    """Say what a step came after where gradients are averaged."""
    return (
        f"after the average of step {number - 1}'s gradients"
        if number
        else "before any gradients were averaged"
    )


def after_steps(number: int) -> str:
    """Say what a step came after where parameters are averaged."""
    return f"after {number} step{'' if number == 1 else 's'}" if number else "before any other"


def difference(
    everybodys: Mapping[int, Account], rank: int, after: Callable[[int], str] = after_average
) -> tuple[int, str] | None:
    """Return who has stepped otherwise than trainer `rank`, and a clause that says how, and what to do.

    Parameters
    ----------
    everybodys : mapping of int to Account
    rank : int
    after : callable
        Says what a step came after, given `Step.before`.
    """
    ours = everybodys[rank]
    for other, theirs in everybodys.items():
        if theirs == ours:
            continue
        first = max(_known_from(theirs), _known_from(ours))
        found = _other_number(theirs, ours, rank, first) or _other_options(theirs, ours, rank, first)
        if found is None:
            return other, (
                f"has made or left out {theirs.count} steps, and not the same as this trainer, {rank}, which "
                f"has made or left out {ours.count}; {_MADE}"
            )
        before, what, where = found
        return other, f"{what} {after(before)} where {where}"
    return None


def _known_from(account: Account) -> int:
    """Return the `Step.before` from which on all of an account's steps are known."""
    return 0 if account.count == len(account.recent) else account.recent[0].before + 1


def _other_number(theirs: Account, ours: Account, rank: int, first: int) -> tuple[int, str, str] | None:
    """Return before which steps the numbers of steps differ, what was found there, and what was expected."""
    found, expected = (
        Counter((step.before, step.groups is None) for step in each.recent) for each in (theirs, ours)
    )
    for before, left_out in sorted(found.keys() | expected.keys()):
        kind = before, left_out
        if before >= first and found[kind] != expected[kind]:
            if left_out:
                what = f"cleared the gradients of {_counted(found[kind])} on which it made no step"
                ours_is = f"this trainer, {rank}, cleared those of {_counted(expected[kind])}"
                return before, what, f"{ours_is}; {_MADE}"
            what = f"made {_times(found[kind])}"
            return before, what, f"this trainer, {rank}, made {_times(expected[kind])}; {_MADE}"
    return None


def _other_options(theirs: Account, ours: Account, rank: int, first: int) -> tuple[int, str, str] | None:
    """Return before which steps a hyper-parameter differs, what was found there, and what was expected."""
    known = ([step for step in each.recent if step.before >= first] for each in (theirs, ours))
    for found, expected in zip(*known, strict=True):
        for number, (group, other) in enumerate(zip(found.groups or (), expected.groups or (), strict=False)):
            for name, value in group.items():
                if value != other.get(name):
                    what = f"stepped with {name}={value} in param group {number}"
                    ours_is = f"this trainer, {rank}, stepped with {name}={other.get(name)}"
                    return found.before, what, f"{ours_is}; {_MET}"
    return None


def _times(number: int) -> str:
    return {0: "no optimizer.step()", 1: "one optimizer.step()"}.get(number, f"{number} optimizer.step()s")


def _counted(number: int) -> str:
    return {0: "no backward pass", 1: "one backward pass"}.get(number, f"{number} backward passes")


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
