"""GradAllReduce: average the gradients of all trainers while the backward pass still runs.

A hook on each parameter puts its gradient, divided by the number of trainers, into a flat bucket; a bucket
that is full leaves at once, in an order that is the same everywhere. When the backward pass ends, what is
left leaves too, the sums are awaited, and the gradients become views of the buckets.

After its gradients a bucket carries one number per parameter: how many trainers had a gradient. A parameter
that some trainers did not use counts there as zeros; one that nobody used keeps no gradient, as in one
process.

One bucket ends with the fingerprint of this trainer's steps as well: each trainer steps its own copy of the
model, and one that steps otherwise than the others, or on gradients that nobody has averaged, trains another
model in silence.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fleet.collective.buckets import BUCKET_BYTES, Extent, is_dense, plan_buckets
from fleet.collective.fingerprints import BITS, Fingerprints, can_count
from fleet.collective.group import Group
from fleet.collective.history import Account, History, Step, difference
from fleet.collective.standing import Way
from fleet.errors import ConfigurationError, FleetError
from fleet.process import progress

__all__ = ["GradientAverager"]


@dataclass
class _Bucket:
    """Gradients that travel together; `flat` ends with one presence count per member."""

    members: list[int]
    flat: torch.Tensor
    present: torch.Tensor
    missing: set[int] = field(default_factory=set)
    work: dist.Work | None = None

    def reset(self) -> None:
        self.missing = set(self.members)
        self.work = None
        self.present.zero_()


@dataclass
class _Slot:
    """Where a parameter's gradient travels: its bucket, its part of it, and its place among the members."""

    name: str
    parameter: torch.Tensor
    bucket: _Bucket
    view: torch.Tensor
    place: int
    copied: int = 0
    """The address of what was handed back last, where that was a copy of the view."""

    def handed_back(self) -> torch.Tensor:
        """Return the gradient as torch would lay it out, also if the parameter's layout has changed since."""
        strides = self.parameter.stride()
        if self.view.stride() == strides or not is_dense(self.parameter.shape, strides):
            self.copied = 0
            return self.view.detach()  # a model that moves sets the data of its gradients
        copy = torch.empty_like(self.parameter).copy_(self.view)
        self.copied = copy.data_ptr()
        return copy

    def is_handed_back(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies where the last one that was handed back does."""
        return gradient.data_ptr() == (self.copied or self.view.data_ptr())


class GradientAverager:
    """Averages the gradients of `parameters` over the trainers of `group`, in every backward pass.

    Parameters
    ----------
    named_parameters
        In the same order on every trainer; those that need no gradient only take trainer 0's values.
    group
        The started group.
    overlap
        Whether a bucket leaves as soon as it is full, or when the backward pass ends.
    bucket_bytes
        How much travels at once.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        group: Group,
        *,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._overlap = overlap
        self._bucket_bytes = bucket_bytes
        self._scale = 1.0 / group.place.size
        self.named_parameters = list(named_parameters)
        """All of them, also those that take no gradient."""
        self._named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._buckets: list[_Bucket] = []
        self._slots: dict[int, _Slot] = {}
        self._channel: dist.ProcessGroup | None = None
        self._num_sent = 0
        self._end: weakref.ref[_End] | None = None
        self._paused = False
        self._accumulated = False
        self._captured = False
        self._own = self._everything = frozenset(range(len(self._named)))
        """Positions whose gradients, if they have any, were not averaged since the last step."""
        self._history = History()
        self._fingerprints: Fingerprints | None = None
        self._handles: list[Callable[[], None]] = []
        self.step = 0

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those whose gradients are averaged."""
        return [parameter for _, parameter in self._named]

    def start(self) -> None:
        """Take every parameter's value from trainer 0, and hook the gradients."""
        self._channel = self._group.channel()
        self._group.use((parameter for _, parameter in self.named_parameters), self._channel)
        self.share("the first values")
        for position, (_, parameter) in enumerate(self._named):
            handle = parameter.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
            self._handles.append(handle.remove)

    def share(self, what: str) -> None:
        """Take every parameter's value from trainer 0."""
        for name, parameter in self.named_parameters:
            self._group.broadcast_(parameter.detach(), f"{what}: {name}")

    def close(self) -> None:
        """Remove the hooks; the parameters are as any others again."""
        for remove in self._handles:
            remove()
        self._handles.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients of the block accumulate here, to be averaged with those of the next backward."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def check_ended(self) -> None:
        """Check that the backward pass before, if there was one, came to its end.

        Raises
        ------
        FleetError
            An error ended it, which the script has caught.
        """
        if self._end is not None and self._end() is None:
            raise FleetError(
                f"the backward pass of step {self.step} was ended by an error, and the other trainers wait "
                "for the gradients that it had still to give; expected the script to end with that error, too"
            )

    def check_averaged(self) -> None:
        """Check that a step is made on gradients that all trainers have in common.

        Those of the step before may be used again, and zeros are the same everywhere.

        Raises
        ------
        ConfigurationError
            A gradient is this trainer's own; the message says whose, and how it gets averaged.
        """
        if self._captured or self._group.place.size == 1:  # the replays of a graph call no hooks
            return
        for position in sorted(self._own):
            name, parameter = self._named[position]
            gradient = parameter.grad
            if gradient is not None and not self._is_common(position, gradient):
                raise ConfigurationError(_own_gradient(name, self._accumulated))

    def note_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note that the optimizer has stepped, with these hyper-parameters; the next exchange tells it."""
        if self._own == self._everything and all(each.grad is None for each in self.parameters):
            return  # it has changed nothing
        self._own = self._everything
        self._history.add(Step(self.step, groups))

    def compare_steps(self, what: str) -> None:
        """Compare the steps of all trainers, in a call that each makes.

        Raises
        ------
        ConfigurationError
            Another trainer has stepped otherwise; the message names it, and says how.
        """
        place = self._group.place
        texts = self._group.agree(what, self._history.account.to_text())
        accounts = {rank: Account.from_text(text) for rank, text in texts.items()}
        if (found := difference(accounts, place.rank)) is not None:
            rank, how = found
            raise ConfigurationError(f"{place.name(rank)} {how}")

    def _is_common(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is what was handed back last, or zero."""
        if gradient.layout is not torch.strided:
            return False
        slot = self._slots.get(position)
        return (slot is not None and slot.is_handed_back(gradient)) or not gradient.any()

    def _fit(self) -> None:
        """Lay out buckets where the gradients are: before the first pass, and after a model has moved."""
        if self._slots and all(
            slot.view.device == slot.parameter.device and slot.view.dtype == slot.parameter.dtype
            for slot in self._slots.values()
        ):
            return
        self._group.use(self.parameters, self._channel)
        self._buckets.clear()
        self._allocate()

    def _allocate(self) -> None:
        self._fingerprints = None
        extents = [
            Extent((parameter.dtype, parameter.device), parameter.numel() * parameter.element_size())
            for _, parameter in self._named
        ]
        for members in plan_buckets(extents, bucket_bytes=self._bucket_bytes):
            parameters = [self._named[position][1] for position in members]
            like = parameters[0]
            size = sum(parameter.numel() for parameter in parameters)
            counts = size + len(members)
            carries = self._fingerprints is None and can_count(like.dtype, self._group.place.size)
            flat = torch.zeros(counts + BITS * carries, dtype=like.dtype, device=like.device)
            if carries:
                self._fingerprints = Fingerprints(flat[counts:], self._group.place.size)
            bucket = _Bucket(members, flat, flat[size:counts])
            bucket.reset()
            self._buckets.append(bucket)
            offset = 0
            for place, (position, parameter) in enumerate(zip(members, parameters, strict=True)):
                view = _part(flat, offset, parameter)
                self._slots[position] = _Slot(self._named[position][0], parameter, bucket, view, place)
                offset += parameter.numel()

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            if self._paused:
                self._accumulated = True
                return
            self.check_ended()
            if self._end is None:
                self._fit()
                self._end = _queue_end(self._finish)
                if self._fingerprints is not None:
                    self._fingerprints.put(self._history.digest)
            self._put(position)
            if self._overlap:
                self._send_full()

        return arrived

    def _put(self, position: int) -> None:
        """Copy a gradient, scaled, into its bucket."""
        slot = self._slots[position]
        gradient = slot.parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"the gradient of {slot.name} is {gradient.layout}; expected a dense one: "
                "build its torch.nn.Embedding with sparse=False"
            )
        if position not in slot.bucket.missing:
            raise FleetError(
                f"the gradient of {slot.name} arrived twice in one backward pass (reentrant checkpointing "
                "does that); expected once: pass use_reentrant=False to torch.utils.checkpoint"
            )
        torch.mul(gradient.detach(), self._scale, out=slot.view)
        slot.bucket.present[slot.place] = 1
        slot.bucket.missing.discard(position)

    def _send_full(self) -> None:
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._send(self._buckets[self._num_sent])

    def _send(self, bucket: _Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.flat, group=self._channel, async_op=True)
        self._num_sent += 1
        progress.count("bytes_reduced", bucket.flat.numel() * bucket.flat.element_size())

    def _finish(self) -> None:
        """Send what did not fill up; the sums are awaited once every optimizer's has left.

        Another trainer's pass may end with another optimizer first: the two must not wait for each other.
        """
        absent: list[int] = []
        for bucket in self._buckets[self._num_sent :]:
            absent += self._complete(bucket)
            self._send(bucket)
        self._end = _queue_end(lambda: self._receive(absent))

    def _receive(self, absent: Sequence[int]) -> None:
        """End a backward pass: await the sums, and hand the gradients back."""
        self._end = None
        try:
            began = time.monotonic()
            works = [bucket.work for bucket in self._buckets]
            device = self._buckets[-1].flat.device
            what = f"the average of step {self.step}'s gradients"
            self._group.wait(works, what, Way.EXCHANGE, device)
            progress.count("wait_seconds", time.monotonic() - began)
            self._compare(device)
            self._hand_back(absent)
        finally:
            self._num_sent = 0
            for bucket in self._buckets:
                bucket.reset()
        self.step += 1

    def _compare(self, device: torch.device) -> None:
        """Compare what all trainers have done, as far as it came with the gradients."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured = True
        elif self._fingerprints is not None and not self._fingerprints.all_alike():
            self.compare_steps(f"steps (at the average of step {self.step}'s gradients)")

    def _complete(self, bucket: _Bucket) -> list[int]:
        """Fill the gaps: what earlier passes accumulated without an exchange counts, nothing is zeros.

        Returns
        -------
        list of int
            The positions of the parameters without a gradient.
        """
        absent = []
        for position in sorted(bucket.missing):
            slot = self._slots[position]
            if slot.parameter.grad is not None:
                self._put(position)
            else:
                slot.view.zero_()
                absent.append(position)
        return absent

    def _hand_back(self, absent: Sequence[int]) -> None:
        slots = self._slots
        unused = {each for each in absent if slots[each].bucket.present[slots[each].place].item() == 0}
        for position, slot in slots.items():
            slot.parameter.grad = None if position in unused else slot.handed_back()
        self._own &= unused
        self._accumulated = False


class _End:
    """What the autograd engine calls at the end of a backward pass; it forgets it if an error comes first."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        """End the pass."""
        self._finish()


def _queue_end(finish: Callable[[], None]) -> "weakref.ref[_End]":
    """Let the engine call `finish` at the end of this backward pass, and keep the only reference to it."""
    end = _End(finish)
    torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001
    return weakref.ref(end)


def _own_gradient(name: str, accumulated: bool) -> str:
    """Return what is said of a gradient that was not averaged."""
    found = f"the gradient of {name} is this trainer's own, and a step on it would train another model here: "
    if accumulated:
        return (
            f"{found}since the last step, all backward passes that reached it were in no_sync(); expected "
            "the last one before optimizer.step() to be outside of it"
        )
    return (
        f"{found}only backward() averages gradients over the trainers, and this one came without, as what "
        "torch.autograd.grad returns does; expected loss.backward(), or "
        "torch.autograd.backward(parameters, gradients) to add gradients of the script's own, averaged"
    )


def _part(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a bucket's part as a gradient in the parameter's layout: fused optimizers read the memory."""
    if is_dense(parameter.shape, parameter.stride()):
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
