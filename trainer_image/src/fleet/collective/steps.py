"""The optimizer steps of each trainer, and their comparison across trainers.

Every trainer steps its own copy of the model. If gradients are averaged, the copies stay equal as long as all
step after the same averages, with the same hyper-parameters. If parameters are averaged, all averaged copies
must have made the same number of steps. A digest of all steps is therefore sent with the averaged tensors. If
digests differ, the trainers compare their last steps in full, and report the first difference.
"""

import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fleet.collective.group import Group
from fleet.errors import ConfigurationError
from fleet.plan.optimizers import KERNEL_FLAGS

if TYPE_CHECKING:
    import torch

__all__ = ["Account", "Step", "Steps", "after_average", "after_steps", "difference", "hyper_parameters"]

_RECENT: Final = 16
"""The number of recent steps that are kept: more than are made before a difference is found."""
_SAME_OPTIONS: Final = (
    "expected the same on every trainer, because each steps its own copy of the model: use the same "
    "hyper-parameters everywhere, and give a scheduler that follows a metric the mean over all trainers "
    "(fleet.all_reduce_worker)"
)
_SAME_STEPS: Final = (
    "expected the same steps on every trainer: to decide whether to skip a step, combine the trainers' "
    "numbers first (fleet.all_reduce_worker)"
)

Groups = Sequence[Mapping[str, Any]]


def after_average(number: int) -> str:
    """Describe what preceded a step, for messages in training that averages gradients."""
    if number == 0:
        return "before any gradients were averaged"
    return f"after the average of step {number - 1}'s gradients"


def after_steps(number: int) -> str:
    """Describe what preceded a step, for messages in training that averages parameters."""
    return f"after {number} step{'' if number == 1 else 's'}" if number else "before any other"


@dataclass(frozen=True)
class Step:
    """An ``optimizer.step()``, or the clearing of gradients without a step.

    Attributes
    ----------
    before : int
        The number of averages of gradients before it; with LocalSGD, which has none, the number of steps.
    groups : sequence of mapping, or None
        Each param group's options; None if gradients were cleared without a step.
    """

    before: int
    groups: Groups | None


@dataclass(frozen=True)
class Account:
    """The number of steps that a trainer has made or skipped, their digest, and the most recent steps."""

    count: int
    digest: int
    recent: Sequence[Step]

    def to_text(self) -> str:
        """Return the account as JSON, which `from_text` reads."""
        recent = [[step.before, step.groups] for step in self.recent]
        return json.dumps([self.count, self.digest, recent])

    @classmethod
    def from_text(cls, text: str) -> "Account":
        """Parse the result of `to_text`."""
        count, digest, recent = json.loads(text)
        return cls(count, digest, [Step(*step) for step in recent])


class Steps:
    """The steps of one optimizer on this trainer.

    Parameters
    ----------
    group : Group
    after : callable, optional
        Describes what preceded a step, given `Step.before`.

    Attributes
    ----------
    number : int
        The number of averages since the job's beginning; with LocalSGD, the number of steps.
    digest : int
        A 32-bit digest of all steps of this process.
    """

    def __init__(self, group: Group, after: Callable[[int], str] = after_average) -> None:
        self._group = group
        self._after = after
        self.number = 0
        self.digest = 0
        self._count = 0
        self._recent: deque[Step] = deque(maxlen=_RECENT)

    def record(self, groups: Groups | None) -> None:
        """Record a step's hyper-parameters, or None if gradients were cleared without a step."""
        self._count += 1
        self._recent.append(Step(self.number, groups))
        self.digest = zlib.crc32(f"{self.number} {groups}".encode(), self.digest)

    @property
    def account(self) -> Account:
        """The account of this trainer's steps, which other trainers read if the digests differ."""
        return Account(self._count, self.digest, tuple(self._recent))

    def compare(self, what: str) -> None:
        """Compare the steps of all trainers; every trainer must call this.

        Raises
        ------
        ConfigurationError
            Another trainer has made different steps; the message names it and the difference.
        """
        world = self._group.world
        texts = self._group.agree(what, self.account.to_text())
        accounts = {rank: Account.from_text(text) for rank, text in texts.items()}
        if (found := difference(accounts, world.rank, self._after)) is not None:
            rank, how = found
            raise ConfigurationError(f"{world.name(rank)} {how}")


def hyper_parameters(optimizer: "torch.optim.Optimizer") -> list[dict[str, Any]]:
    """Return the options in each param group that must be the same on every trainer.

    Options that select a kernel are omitted, because they depend on the device. So are entries that are not
    the optimizer's own (a scheduler's, the script's), because they do not affect a step.
    """
    names = [name for name in optimizer.defaults if name not in KERNEL_FLAGS]
    return [{name: _plain(group[name]) for name in names} for group in optimizer.param_groups]


def difference(
    accounts: Mapping[int, Account], rank: int, after: Callable[[int], str] = after_average
) -> tuple[int, str] | None:
    """Return the first trainer whose steps differ from trainer `rank`'s, with the difference, or None.

    Parameters
    ----------
    accounts : mapping of int to Account
        By rank, including that of trainer `rank`.
    rank : int
    after : callable
        Describes what preceded a step, given `Step.before`.
    """
    ours = accounts[rank]
    for other, theirs in accounts.items():
        if theirs == ours:
            continue
        first = max(_known_from(theirs), _known_from(ours))
        found = _other_number(theirs, ours, rank, first) or _other_options(theirs, ours, rank, first)
        if found is None:
            return other, (
                f"has made or skipped {theirs.count} steps, which differ from those of this trainer, {rank}, "
                f"which has made or skipped {ours.count}; {_SAME_STEPS}"
            )
        before, what, where = found
        return other, f"{what} {after(before)} where {where}"
    return None


def _known_from(account: Account) -> int:
    """Return the smallest `Step.before` from which the account contains every step."""
    # The step that was dropped last may have had the same `before` as the oldest one that is kept.
    return 0 if account.count == len(account.recent) else account.recent[0].before + 1


def _other_number(theirs: Account, ours: Account, rank: int, first: int) -> tuple[int, str, str] | None:
    """Return the first `Step.before` with different numbers of steps and a description of each, or None."""
    found, expected = (
        Counter((step.before, step.groups is None) for step in each.recent) for each in (theirs, ours)
    )
    for before, skipped in sorted(found.keys() | expected.keys()):
        kind = before, skipped
        if before >= first and found[kind] != expected[kind]:
            if skipped:
                what = f"cleared the gradients of {_counted(found[kind])} without a step"
                ours_is = f"this trainer, {rank}, cleared those of {_counted(expected[kind])}"
                return before, what, f"{ours_is}; {_SAME_STEPS}"
            what = f"made {_times(found[kind])}"
            return before, what, f"this trainer, {rank}, made {_times(expected[kind])}; {_SAME_STEPS}"
    return None


def _other_options(theirs: Account, ours: Account, rank: int, first: int) -> tuple[int, str, str] | None:
    """Return the first `Step.before` at which hyper-parameters differ, and what each trainer did, or None."""
    known = ([step for step in each.recent if step.before >= first] for each in (theirs, ours))
    # Of equal length, because `_other_number` has found no difference.
    for found, expected in zip(*known, strict=True):
        for number, (group, other) in enumerate(zip(found.groups or (), expected.groups or (), strict=False)):
            for name, value in group.items():
                if value != other.get(name):
                    what = f"stepped with {name}={value} in param group {number}"
                    ours_is = f"this trainer, {rank}, stepped with {name}={other.get(name)}"
                    return found.before, what, f"{ours_is}; {_SAME_OPTIONS}"
    return None


def _times(number: int) -> str:
    return {0: "no optimizer.step()", 1: "one optimizer.step()"}.get(number, f"{number} optimizer.step()s")


def _counted(number: int) -> str:
    return {0: "no backward pass", 1: "one backward pass"}.get(number, f"{number} backward passes")


def _plain(value: object) -> Any:
    """Convert an option to a JSON value."""
    if isinstance(value, float):
        return float(f"{value:.9g}")  # the last digits of a schedule may differ between processors
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and not getattr(value, "is_cuda", False):
        return _plain(value.item())  # type: ignore[attr-defined]
    return type(value).__name__  # reading a value from a GPU would wait for the device
