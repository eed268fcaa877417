"""Sending gradients during the backward pass. Once sent, a gradient must not change.

Many scripts modify gradients between a backward pass and ``step()``: they clip or unscale gradients, or
accumulate several backward passes. So in the first rounds all gradients are sent in ``step()``. If the
strategy does not decide, the behavior of the script in these rounds determines whether later gradients are
sent early.

A queued gradient is sent from the gradient's own memory, not from a copy. Therefore every change that makes
the sent gradient differ from the final gradient is detected, in ``step()`` at the latest, and raises an error
that names a remedy.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import TrainerMode
from fleet.parameter_server.trainer.own_optimizer import Scaling, StepGuard
from fleet.parameter_server.trainer.parameters import (
    LazyArena,
    Mark,
    check_dtype,
    covers_all,
    part_of,
    version_of,
)
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.transport.arena import bytes_of, dtype_of
from fleet.plan.job import TrainerPlan
from fleet.plan.optimizers import KERNEL_FLAGS, read_hyper_parameters
from fleet.process.finite import NO_ROWS, FiniteCheck, OfRows
from fleet.wire import NO_STEP, HyperParameters

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from fleet.plan.blocks import PlannedBlock

__all__ = ["GradientFlow", "SentGradient", "hyper_parameters_of"]

_NO_OVERLAP: Final = "DistributedStrategy(overlap=False), which sends all gradients in optimizer.step()"
_PLAIN: Final = frozenset({bool, float, int, str, type(None)})
_log = logging.getLogger(__name__)


def hyper_parameters_of(optimizer: Optimizer) -> HyperParameters:
    """Return the options of an optimizer's param groups, except those that select kernels."""
    names = [name for name in optimizer.defaults if name not in KERNEL_FLAGS]
    of_groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {name: group[name] for name in names}
        if not all(type(value) in _PLAIN for value in options.values()):  # a tuple or a one-element tensor
            plain = read_hyper_parameters(optimizer, group)
            options = {name: plain[name] for name in names}
        of_groups.append(options)
    return tuple(of_groups)


@dataclass(slots=True)
class SentGradient:
    """A gradient that was sent, or that an observed step recorded instead of sending it early."""

    gradient: Tensor
    version: int
    address: int
    carried: Tensor
    """The tensor to send: the gradient itself, or a copy in memory from which a socket can send."""
    payload: memoryview
    """The bytes of `carried`."""
    mark: Mark | None
    """The mark that reveals changes of the payload; None in step(), or if comparing would be costly."""

    @property
    def unchanged(self) -> bool:
        """True if the gradient still has the same version, address and content."""
        # Assigning `gradient.data` changes the address, but not the version.
        if version_of(self.gradient) != self.version or self.gradient.data_ptr() != self.address:
            return False
        if self.mark is None:
            return True
        present = self.payload
        if self.carried is not self.gradient:
            present = bytes_of(self.gradient.detach().cpu().contiguous())
        return self.mark.matches(present)


class GradientFlow:
    """Sends the gradients of a trainer's parameters to the servers.

    Parameters
    ----------
    plan : TrainerPlan
        The blocks of the parameters.
    parameters : mapping of name to Parameter
    optimizer : Optimizer
        The user's optimizer, whose param groups give the hyper-parameters of each step.
    mode : TrainerMode
        The trainer side of the mode, which sends the gradients.
    overlap : bool or None
        Whether a gradient is sent as soon as the backward pass has produced it. For None, gradients are sent
        early after the first rounds, unless the script changes gradients or hyper-parameters before
        ``step()``.
    outlasting : bool
        Whether gradients may still be in flight when ``step()`` returns. If so, they must not change before
        the next step begins.
    finite : FiniteCheck, optional
        The check of gradients, for steps that no gradient scaler checks.
    rows : TrainerRows, optional
        The tables on the servers, if any.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        parameters: Mapping[str, Parameter],
        optimizer: Optimizer,
        mode: TrainerMode,
        *,
        overlap: bool | None,
        outlasting: bool = False,
        finite: FiniteCheck | None = None,
        rows: TrainerRows | None = None,
    ) -> None:
        param_of = {block.id: block.param for block in plan.blocks}
        # The order in which the backward pass produces gradients, on all trainers. If priorities differed
        # between trainers, the servers' buffers would fill with gradients that wait for other trainers.
        order = dict.fromkeys(param_of[block] for block in plan.send_order)
        self._parameters = {name: parameters[name] for name in order}
        self._blocks = {name: plan.blocks_of(name) for name in order}
        self._dtypes = {name: dtype_of(blocks[0].dtype) for name, blocks in self._blocks.items()}
        self._ranges = {name: _byte_ranges(blocks) for name, blocks in self._blocks.items()}
        """The blocks of each parameter, with their byte ranges in its gradient."""
        self._optimizer = optimizer
        self._mode = mode
        self._finite = finite
        # A `TrainerRows` without tables is false.
        self._rows = rows or None
        self.guard = StepGuard(optimizer)
        self._handles: list[RemovableHandle] = []
        self._overlaps = overlap is not False
        """Whether gradients may be sent early, now or after the first rounds."""
        self._observes = overlap is None
        """Whether the current round only observes the script, instead of sending gradients early."""
        self._paused = False
        self._round = 0
        """The number of completed steps."""
        self._seen: dict[str, SentGradient] = {}
        """The gradients that the current observed step has recorded instead of sending them early."""
        self._seen_hyper: HyperParameters | None = None
        self._beginning = threading.Lock()
        """Held while the first gradient begins a step, because each device has its own backward thread."""
        self._sent: dict[str, SentGradient] = {}
        self._hyper: HyperParameters | None = None
        self._earlier: dict[str, SentGradient] | None = {} if outlasting else None
        """The gradients of the previous step, if they may still be in flight."""
        self._part = part_of(self._parameters.values())
        self._marks = {name: Mark(e.nbytes, self._part, copies=False) for name, e in self._parameters.items()}
        self._staging = LazyArena(self._parameters)
        """Copies of gradients that a socket cannot send from their own memory."""

    def attach(self) -> None:
        """Add hooks to the parameters and the user's optimizer."""
        self.guard.attach()
        if self._overlaps:
            for name, parameter in self._parameters.items():
                hook = partial(self._accumulated, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def detach(self) -> None:
        """Remove the hooks."""
        self.guard.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate gradients without sending them, within the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def step(self, scaling: Scaling | None = None) -> None:
        """Send the remaining gradients, and end the step.

        Parameters
        ----------
        scaling : Scaling, optional
            The state of a gradient scaler, if there is one. Gradients are unscaled before they are sent, and
            none are sent if any of them is not finite.

        Raises
        ------
        FleetError
            A gradient or a hyper-parameter changed after it was sent, or a server failed.
        """
        hyper = hyper_parameters_of(self._optimizer)
        if self._observes:
            self._learn(hyper, scaled=scaling is not None)
        if self._hyper not in (None, hyper):
            raise _changed_hyper(self._hyper, hyper)
        for name, sent in self._sent.items():
            # A script may also replace a gradient, as in `p.grad = clipped`.
            if self._parameters[name].grad is not sent.gradient or not sent.unchanged:
                raise FleetError(
                    f"the gradient of {name} was changed after it had been sent, for example by clipping or "
                    f"by a GradScaler, so the change would be lost. Use {_NO_OVERLAP}, or clip on the "
                    "servers (strategy.grad_clip)"
                )
        grads = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
        # Unscaled before sending, because a float16 sum over trainers may overflow where no gradient does.
        finite = scaling is None or self._unscale(scaling, grads)
        of_rows = self._rows.gradients() if self._rows is not None else NO_ROWS
        check = self._finite if scaling is None else None
        if check is not None and (of_rows or self._round >= check.next_look):
            finite = check.lets_step(grads, of_rows, self._round)
        if self._hyper is None:
            self._begin(hyper if finite else NO_STEP)
        absent: list[PlannedBlock] = []
        for name in self._parameters:
            if name in self._sent:
                continue
            if name in grads and finite:
                self._send(name, grads[name])
            else:
                absent += self._blocks[name]
        self._end(absent, of_rows if finite else NO_ROWS)
        if self._earlier is not None:
            self._earlier = self._sent
        self._sent, self._hyper = {}, None
        self._round += 1
        self._observes = self._observes and covers_all(self._round)

    def check_earlier(self) -> None:
        """Raise an error if a gradient of the last step changed in flight. Call this once all have arrived.

        Raises
        ------
        FleetError
            The servers may have summed a gradient that differs from the computed one.
        """
        if not self._earlier:
            return
        earlier, self._earlier = self._earlier, {}
        for name, sent in earlier.items():
            if version_of(sent.gradient) != sent.version:
                raise FleetError(
                    f"the gradient of {name} was changed in place after optimizer.step(), possibly before it "
                    "had been sent. Call zero_grad() with set_to_none=True, the default, or use "
                    "DistributedStrategy(cross_step=False)"
                )

    def check_nothing_in_flight(self, what: str) -> None:
        """Raise an error if a gradient has been sent since the last step.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        if self._seen:
            self._stop_overlap(f"{what} between a backward() and its step()")
        if self._sent:
            raise FleetError(
                f"{what}, but the gradients of {len(self._sent)} parameters ({next(iter(self._sent))} …) "
                "have already been sent, and optimizer.step() has not been called; the other trainers rely "
                f"on these gradients. To skip steps, use {_NO_OVERLAP}"
            )

    def _accumulated(self, name: str, parameter: Parameter) -> None:
        """Send a gradient that a backward pass has just accumulated; in an observed step, only record it."""
        if self._paused or not self._overlaps or parameter.grad is None:
            return
        if self._observes:
            self._observe(name, parameter.grad)
            return
        if name in self._sent:
            raise FleetError(
                f"a second backward() reached {name}, whose gradient has already been sent in this step. "
                "Call optimizer.step() after each backward(), or wrap all backward passes of a step except "
                f"the last in optimizer.no_sync(); or use {_NO_OVERLAP}"
            )
        with self._beginning:
            if self._hyper is None:
                self._begin(hyper_parameters_of(self._optimizer))
        self._send(name, parameter.grad, early=True)

    def _begin(self, hyper: HyperParameters) -> None:
        self._mode.begin(hyper)
        if self._earlier:
            self.check_earlier()
        self._hyper = hyper

    def _send(self, name: str, gradient: Tensor, *, early: bool = False) -> None:
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"the gradient of {name} is sparse ({gradient.layout}), but its module is unknown; pass the "
                "model, as in fleet.distributed_optimizer(optimizer, strategy, model=model), or use "
                "sparse=False"
            )
        if gradient.dtype is not self._dtypes[name]:
            check_dtype(name, gradient, self._dtypes[name])
        # A gradient that leaves in step() needs no mark: step() compares marks before it sends.
        sent = self._sent[name] = self._record(name, gradient, marked=early)
        for block, range_ in self._ranges[name]:
            self._mode.send(block, sent.payload[range_])

    def _end(self, absent: Sequence["PlannedBlock"], of_rows: OfRows) -> None:
        """Send the row gradients, then end the step."""
        if self._rows is None:
            self._mode.finish(absent)
            return
        if self._mode.queue_rows(of_rows):
            self._mode.finish(absent)
        else:
            self._rows.send(of_rows)
            self._mode.finish(absent)
            self._rows.end_step()
        self._rows.forget_gradients()

    def _unscale(self, scaling: Scaling, grads: Mapping[str, Tensor]) -> bool:
        """Divide gradients by the gradient scaler's factor; return whether all are finite."""
        if self._sent:
            raise FleetError(
                f"a gradient scaler is in use, but the gradient of {next(iter(self._sent))} has already been "
                f"sent without unscaling. Use {_NO_OVERLAP}"
            )
        of_rows = self._rows.gradient_tensors() if self._rows is not None else []
        scaling.undo([*of_rows, *grads.values()])
        return not scaling.found_inf

    def _record(self, name: str, gradient: Tensor, *, marked: bool) -> SentGradient:
        """Record a gradient's state and, if `marked` is True and comparing is cheap, mark its content."""
        carried = gradient
        if gradient.device.type != "cpu" or not gradient.is_contiguous():
            carried = self._staging[name].copy_(gradient.detach())
        payload, mark = bytes_of(carried), None
        small = self._part >= 1.0 and gradient.device.type == "cpu"
        if marked and (carried is gradient or small or covers_all(self._round)):
            mark = self._marks[name]
            mark.take(payload, self._round)
        return SentGradient(gradient, version_of(gradient), gradient.data_ptr(), carried, payload, mark)

    def _observe(self, name: str, gradient: Tensor) -> None:
        """Record a gradient of an observed step, in which gradients are not sent early."""
        if name in self._seen:
            self._stop_overlap(f"a second backward() of a step reached {name}")
        elif gradient.layout is torch.strided:
            self._seen[name] = self._record(name, gradient, marked=True)
            if self._seen_hyper is None:
                self._seen_hyper = hyper_parameters_of(self._optimizer)

    def _learn(self, hyper: HyperParameters, *, scaled: bool) -> None:
        """Decide, at the end of an observed step, whether gradients may be sent early."""
        if scaled:
            self._stop_overlap("a gradient scaler is in use")
        elif self._seen_hyper not in (None, hyper):
            self._stop_overlap("hyper-parameters were changed between backward() and step()")
        for name, seen in self._seen.items():
            if self._parameters[name].grad is not seen.gradient or not seen.unchanged:
                self._stop_overlap(f"the gradient of {name} was changed between backward() and step()")
                break
        self._seen, self._seen_hyper = {}, None

    def _stop_overlap(self, because: str) -> None:
        """Send gradients only in ``step()`` from now on, and log the reason."""
        self._overlaps = self._observes = False
        self._seen, self._seen_hyper = {}, None
        _log.info(
            "gradients are sent in optimizer.step() instead of during the backward pass, because %s. "
            "Set DistributedStrategy(overlap=False) to do this from the first step",
            because,
        )


def _byte_ranges(blocks: "Sequence[PlannedBlock]") -> list[tuple["PlannedBlock", slice]]:
    size = dtype_of(blocks[0].dtype).itemsize
    return [(block, slice(block.begin * size, block.end * size)) for block in blocks]


def _changed_hyper(sent: HyperParameters | None, present: HyperParameters) -> FleetError:
    changes = ", ".join(
        f"{name} from {before.get(name)} to {now[name]} in param group {group}"
        for group, (before, now) in enumerate(zip(sent or (), present, strict=True))
        for name in now
        if before.get(name) != now[name]
    )
    return FleetError(
        f"hyper-parameters changed after the first gradient of the step had been sent: {changes}. Change "
        "them between optimizer.step() and the next backward(), where a scheduler's step() belongs; or use "
        f"{_NO_OVERLAP}"
    )
