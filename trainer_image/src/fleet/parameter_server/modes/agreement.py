"""The shared state of a sync step: its participants, hyper-parameters and norms.

This module does no I/O. Every server adds the parts of a norm in the same order, so that all servers clip by
the same factor and runs are bitwise reproducible.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.parameter_server.shard import NormPart, SendNormPart
from fleet.plan.clipping import NormPlan
from fleet.wire import NO_STEP, HyperParameters

__all__ = [
    "KnownNorm",
    "NormBook",
    "Participants",
    "PendingNorm",
    "clip_coefficient",
    "sum_of_squares",
    "total_of",
]

_EPSILON: Final = 1e-6
"""The constant that `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides by the norm."""


class Participants:
    """The trainers in the current steps, with their hyper-parameters; the caller holds the lock.

    Parameters
    ----------
    num_trainers : int
        The number of trainers, each of which counts until it completes.
    """

    def __init__(self, num_trainers: int) -> None:
        self.live = frozenset(range(num_trainers))
        """The trainers that must contribute to every step."""
        self.attempts: dict[int, int] = {}
        """The attempt of the latest join of each trainer that was admitted after the start."""
        self.hyper: dict[int, dict[int, HyperParameters]] = {}
        """The hyper-parameters of the current steps, by step and trainer."""

    def admit(self, trainer: int, attempt: int) -> None:
        """Add a trainer to the current steps after it has joined with this attempt."""
        self.live |= {trainer}
        self.attempts[trainer] = attempt

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters, lowest_step: int = 0) -> None:
        """Record the hyper-parameters of a trainer's step, and drop those of steps before `lowest_step`.

        Raises
        ------
        ConfigurationError
            Another trainer has different hyper-parameters for this step.
        """
        for over in [known for known in self.hyper if known < lowest_step]:
            del self.hyper[over]
        of_trainers = self.hyper.setdefault(step, {})
        of_trainers.pop(trainer, None)  # an earlier process of the trainer may have had another schedule
        other = next((each for each, known in of_trainers.items() if known != NO_STEP), trainer)
        expected = of_trainers.get(other, hyper_parameters)
        of_trainers[trainer] = hyper_parameters
        if hyper_parameters not in (NO_STEP, expected):
            raise ConfigurationError(
                f"step {step}: the hyper-parameters of trainer {trainer} differ from those of trainer "
                f"{other}: {_difference(hyper_parameters, expected)}; in sync mode a schedule must not "
                "depend on the trainer's own data, and a restarted trainer must advance its schedule to the "
                "current step, as fleet.epochs(n, loader, scheduler) does"
            )

    def hyper_of(self, step: int, trainers: Collection[int]) -> HyperParameters:
        """Return the hyper-parameters of a step, given the trainers whose gradients it uses.

        The result is `NO_STEP` if there are no trainers, or if any trainer has announced `NO_STEP` because
        its gradients are not finite: the sum would not be finite either, so a single process would also skip
        the step.
        """
        of_trainers = self.hyper.get(step, {})
        return of_trainers[min(trainers)] if trainers and NO_STEP not in of_trainers.values() else NO_STEP


def _difference(found: HyperParameters, expected: HyperParameters) -> str:
    if len(found) != len(expected):
        return f"{len(found)} param groups instead of {len(expected)}"
    return ", ".join(
        f"{name}={ours.get(name)} instead of {name}={theirs.get(name)} in param group {group}"
        for group, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )


@dataclass(frozen=True, slots=True)
class KnownNorm:
    """A complete norm, with the factor that clips the gradients."""

    step: int
    norm: NormPlan
    coefficient: float
    """The factor by which gradients are multiplied to clip them."""


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """A norm that still lacks parts from other servers; this server has sent its own part."""

    step: int
    norm: NormPlan
    servers: tuple[int, ...]


@dataclass(slots=True)
class _Parts:
    """The sums of squares that have arrived for one norm in one step, by block."""

    own: dict[int, float] = field(default_factory=dict)
    sent: bool = False
    others: dict[int, Mapping[int, float]] = field(default_factory=dict)


class NormBook:
    """Collects the parts of each norm that covers blocks of one server.

    Parameters
    ----------
    norms : sequence of NormPlan
    server : int
        This server's index.
    send : callable
        Sends this server's part to the other servers that a norm covers, without waiting for them.
    """

    def __init__(self, norms: Sequence[NormPlan], server: int, send: SendNormPart) -> None:
        self.blocks = frozenset(block for norm in norms for block in norm.blocks)
        """The blocks whose gradients are clipped by a norm."""
        self._norm_of = {block: norm for norm in norms for block in norm.blocks}
        self._norms = {norm.key: norm for norm in norms}
        self._server = server
        self._send = send
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, str], _Parts] = {}

    def add(self, step: int, block: int, sum_of_squares: float) -> KnownNorm | None:
        """Add the sum of squares of the gradient of one of this server's blocks.

        Returns
        -------
        KnownNorm or None
            The norm that this call completes, if any. For each norm of a step, exactly one call returns it.
        """
        norm = self._norm_of[block]
        with self._lock:
            # A server that missed this server's acknowledgement resends its part even after the step was
            # made.
            for over in [known for known in self._parts if known[1] == norm.key and known[0] < step]:
                del self._parts[over]
            parts = self._parts.setdefault((step, norm.key), _Parts())
            parts.own[block] = sum_of_squares
            if len(parts.own) < len(norm.blocks):
                return None
            parts.sent = True
            known = self._pop_known(step, norm)
        others = [server for server in norm.servers if server != self._server]
        if others:  # even if this server has all parts: the others still need this one
            self._send(NormPart(step, norm.key, self._server, dict(parts.own)), others)
        return known

    def add_part(self, part: NormPart, present_step: int) -> KnownNorm | None:
        """Add another server's part of a norm; ignore duplicates and parts of earlier steps.

        Parameters
        ----------
        part : NormPart
        present_step : int
            The number of steps that the blocks of this norm have made.

        Returns
        -------
        KnownNorm or None
            See `add`.

        Raises
        ------
        KeyError
            No such norm covers blocks of both servers.
        """
        norm = self._norms[part.key]
        if part.server == self._server or part.server not in norm.servers:
            raise KeyError(part.key)
        with self._lock:
            if part.step < present_step:
                return None
            self._parts.setdefault((part.step, part.key), _Parts()).others[part.server] = part.sums
            return self._pop_known(part.step, norm)

    def first_block(self, key: str) -> int:
        """Return a block of this server that a norm covers; raise KeyError for an unknown norm."""
        return self._norms[key].blocks[0]

    def pending(self) -> PendingNorm | None:
        """Return a norm that still lacks parts from other servers, or None if all norms are complete."""
        with self._lock:
            for (step, key), parts in self._parts.items():
                norm = self._norms[key]
                missing = tuple(
                    server for server in norm.servers if server != self._server and server not in parts.others
                )
                if parts.sent and missing:
                    return PendingNorm(step, norm, missing)
        return None

    def _pop_known(self, step: int, norm: NormPlan) -> KnownNorm | None:
        parts = self._parts[step, norm.key]
        if not parts.sent or len(parts.others) + 1 < len(norm.servers):
            return None
        del self._parts[step, norm.key]
        # `total_of` adds in the order of the blocks, so the order of arrival does not matter.
        sums = dict(parts.own)
        for theirs in parts.others.values():
            sums |= theirs
        return KnownNorm(step, norm, clip_coefficient(total_of(sums), norm.max_norm))


def sum_of_squares(gradient: Tensor) -> float:
    """Return the sum of a gradient's squared elements; nan and inf propagate.

    The sum has double precision, so that neither the slicing of a parameter into blocks nor its dtype changes
    the norm.
    """
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return float(norm * norm)


def total_of(sums: Mapping[int, float]) -> float:
    """Return the total of the blocks' sums, added in block order so that it is equal on all servers."""
    return sum((sums[block] for block in sorted(sums)), start=0.0)


def clip_coefficient(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor, at most 1, that reduces a norm to `max_norm`, or nan if the norm is nan.

    Parameters
    ----------
    sum_of_squares : float
        The square of the norm.
    max_norm : float

    Returns
    -------
    float
        The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients.
    """
    coefficient = max_norm / (float(sum_of_squares) ** 0.5 + _EPSILON)
    # Not min(1.0, coefficient), which would be 1 for nan.
    return 1.0 if coefficient > 1.0 else coefficient
