"""LocalSGD: trainers step locally, and average their parameters at intervals."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fleet.averaging import LocalSGD
from fleet.collective.copies import Copies
from fleet.collective.heartbeats import WaitKind
from fleet.collective.reducer import BUCKET_BYTES, Flags
from fleet.collective.steps import Steps, after_steps
from fleet.collective.synchronizer import Synchronizer
from fleet.errors import ConfigurationError
from fleet.process import progress

__all__ = ["ParameterAverager"]


class ParameterAverager(Synchronizer):
    """Averages an optimizer's parameters at intervals; see `Synchronizer`.

    Gradients and the optimizer's state stay local to each trainer; `equalize` averages the state as well.

    Parameters
    ----------
    copies : Copies
    optimizer : torch.optim.Optimizer
    plan : LocalSGD
    """

    def __init__(self, copies: Copies, optimizer: torch.optim.Optimizer, plan: LocalSGD) -> None:
        super().__init__(Steps(copies.group, after_steps))
        self._copies = copies
        self._group = copies.group
        self._named = copies.trained
        self._optimizer = optimizer
        self._plan = plan
        self._channel: dist.ProcessGroup | None = None
        self._stepped = False
        """True if a step has run since gradients were last cleared."""
        self._closed = False

    def start(self) -> None:
        """Connect to the other trainers; see `Synchronizer`."""
        self._channel = self._group.channel()
        self._group.use((parameter for _, parameter in self._named), self._channel)

    def close(self) -> None:
        """Stop averaging because the other trainers have left the job."""
        self._closed = True

    def on_zero_grad(self) -> None:
        """Record that gradients were cleared without a step, as when a GradScaler skips the step."""
        if not self._stepped and any(_is_nonzero(parameter.grad) for _, parameter in self._named):
            self.steps.record(None)
        self._stepped = False

    def check_scaled(self) -> None:
        """Raise an error, because a GradScaler could skip a step on this trainer only.

        Raises
        ------
        ConfigurationError
            Always, because each trainer's local gradients would decide whether it skips a step.
        """
        raise ConfigurationError(
            "a GradScaler makes a fused optimizer skip a step if this trainer's own gradients overflow, but "
            "with LocalSGD all trainers must make the same number of steps; expected no scaler: use "
            "torch.bfloat16, which needs none, or leave strategy.local_sgd at None"
        )

    @property
    def step_of_gradients(self) -> int:
        """The number of the step that will use the current gradients; steps are counted instead of passes."""
        return self.steps.number

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Average the parameters if an average is due; see `Synchronizer`."""
        if self._closed:
            return
        self._stepped = True
        self.steps.record(groups)
        self.steps.number += 1
        self.apart = True
        if self._plan.is_due(self.steps.number):
            what = f"the average of the parameters after step {self.steps.number}"
            self._average([parameter for _, parameter in self._named], what)

    def equalize(self, what: str) -> None:
        """Average the parameters and the optimizer's state; see `Synchronizer`.

        A checkpoint has one part for all trainers. With only trainer 0's momentum, a resumed job would train
        differently from an uninterrupted one.

        Raises
        ------
        ConfigurationError
            Another trainer's optimizer keeps different tensors.
        """
        kept = {
            f"{name}: {key}": value
            for name, parameter in self._named
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and _is_averaged(key, value, parameter)
        }
        ours = "\n".join(f"{name} {tuple(value.shape)}" for name, value in kept.items())
        world = self._group.world
        for rank, theirs in self._group.agree(f"the state of the optimizers at {what}", ours).items():
            if theirs != ours:
                raise ConfigurationError(
                    f"the optimizer of {world.name(rank)} keeps different tensors from this trainer's, "
                    f"{world.rank}, so {what} cannot average them; expected every trainer's loss to reach "
                    "the same parameters"
                )
        parameters = [parameter for _, parameter in self._named]
        self._average([*parameters, *kept.values()], f"the average of the parameters for {what}")

    @torch.no_grad()
    def _average(self, values: Sequence[torch.Tensor], what: str) -> None:
        """Replace each tensor, in place, with its mean over the trainers."""
        began = time.monotonic()
        size = self._group.world.size
        device = values[0].device if values else torch.device("cpu")  # empty if all are sharded
        # Without a delay: the next exchange may be many steps away.
        flags = Flags(0, size, device, delay=0)
        flags.leaf.grad = flags.gradient((), self.steps.digest ^ self._copies.digest)
        buckets = [
            # Divided before the sum, as torch's reducer does: a sum in float16 may overflow where the mean
            # does not.
            (members, torch.cat([member.reshape(-1) for member in members]).div_(size))
            for members in (*_buckets(values), [flags.leaf.grad])
        ]
        with self._group.waiting(what, WaitKind.EXCHANGE, device):
            works = [dist.all_reduce(flat, group=self._channel, async_op=True) for _, flat in buckets]
            for work in works:
                if work is not None:
                    work.wait()
        for members, flat in buckets:
            parts = torch.split(flat, [member.numel() for member in members])
            for member, part in zip(members, parts, strict=True):
                member.copy_(part.view(member.shape))
            progress.count("bytes_reduced", flat.numel() * flat.element_size())
        progress.count("wait_seconds", time.monotonic() - began)
        if not flags.are_equal():
            self.steps.compare(f"steps (at {what})")
            self._copies.compare_buffers()
        self._copies.share_buffers()
        self.apart = False


def _is_averaged(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if an entry of the optimizer's state depends on gradients, as momentum does."""
    like_the_parameter = value.shape == parameter.shape and key != "step"
    return (value.is_floating_point() or value.is_complex()) and (value.dim() > 0 or like_the_parameter)


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _buckets(values: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of the same dtype and device into buckets of limited size."""
    buckets: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for value in values:
        kind = (value.dtype, value.device)
        members, size = filling.get(kind, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            members, size = [], 0
            buckets.append(members)
        members.append(value)
        filling[kind] = (members, size + value.numel() * value.element_size())
    return buckets
