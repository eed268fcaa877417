"""Gradients on their way out: each leaves the moment it exists, and nothing may happen to it afterwards.

Many a script does something to them all the same: it clips them, unscales them, or adds up several backward
passes. So in the first rounds all of them leave in ``step()``, and what the script has done until then tells
whether they may leave earlier from then on.

While a gradient's bytes wait in a queue they are still the gradient's own memory. So everything that would
make the sent gradient another than the one that counts is noticed, at the latest in ``step()``, and is an
error that names its remedy.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import TrainerMode
from fleet.parameter_server.trainer.marks import Recorder, SentGradient, version_of
from fleet.parameter_server.trainer.overlap import NO_OVERLAP, Overlap
from fleet.parameter_server.trainer.parameters import check_dtype
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.trainer.scaling import Scaling
from fleet.parameter_server.transport.arena import dtype_of
from fleet.plan.job import TrainerPlan
from fleet.plan.optimizers import KERNEL_FLAGS, read_hyper_parameters
from fleet.process.finite import FiniteCheck, OfRows
from fleet.wire import NO_STEP, HyperParameters

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from fleet.plan.blocks import PlannedBlock

__all__ = ["GradientFlow", "OwnStep", "hyper_parameters_of"]


class OwnStep:
    """Refuses a ``step()`` of the optimizer that fleet has been given.

    Its hooks are those of what fleet returns as well, so both call this one.

    Parameters
    ----------
    optimizer : Optimizer
        The user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handle: RemovableHandle | None = None
        self._allowed = False

    def attach(self) -> None:
        """Refuse from now on."""
        if self._handle is None:
            self._handle = self._optimizer.register_step_pre_hook(self._refuse)

    def detach(self) -> None:
        """Let it step again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def replace(self, step: Callable[[], object]) -> None:
        """Make this step in the place of the optimizer's own, within the hooks on that."""
        with self.allowed():
            Optimizer.profile_hook_step(lambda _: step())(self._optimizer)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the optimizer step by itself for a while."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    def _refuse(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer or self._allowed:
            return
        name = type(optimizer).__name__
        raise FleetError(
            f"step() was called on the {name} that fleet.distributed_optimizer() had been given; it would "
            "train this process alone. Keep what the function returns, and step that: "
            "optimizer = fleet.distributed_optimizer(optimizer)"
        )


def hyper_parameters_of(optimizer: Optimizer) -> HyperParameters:
    """Return the options of an optimizer's param groups, without those that say how it computes."""
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    return tuple(
        {
            name: value
            for name, value in read_hyper_parameters(optimizer, group).items()
            if name not in KERNEL_FLAGS
        }
        for group in groups
    )


def _check_hyper(sent: HyperParameters | None, present: HyperParameters) -> None:
    """Check that hyper-parameters are still those that have been sent, if they have been."""
    if sent is None or present == sent:
        return
    changes = ", ".join(
        f"{name} from {before.get(name)} to {now[name]} in param group {group}"
        for group, (before, now) in enumerate(zip(sent, present, strict=True))
        for name in now
        if before.get(name) != now[name]
    )
    raise FleetError(
        f"hyper-parameters changed after the first gradient of the step had been sent: {changes}. Change "
        "them after optimizer.step(), where a scheduler's step() belongs, and before the next "
        f"backward(); or use {NO_OVERLAP}"
    )


class GradientFlow:
    """Sends the gradients of a trainer's parameters, step by step.

    Parameters
    ----------
    plan : TrainerPlan
        Which blocks the parameters have.
    parameters : mapping of name to Parameter
    optimizer : Optimizer
        The user's, whose param groups give the hyper-parameters of each step.
    mode : TrainerMode
        Where gradients go.
    overlap : bool or None
        Whether a gradient leaves as soon as the backward pass has produced it. None: in the first rounds it
        does not, and then it does unless the script has done something between a backward pass and
        ``step()`` that this would make an error.
    outlasting : bool
        Whether gradients may still be under way when ``step()`` returns: they must not change before the
        next step begins.
    finite : FiniteCheck, optional
        Looks at the gradients of each step, where no gradient scaler does.
    rows : TrainerRows, optional
        The tables that live on the servers, if there are some.
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
        order = dict.fromkeys(param_of[block] for block in plan.send_order)
        self._parameters = {name: parameters[name] for name in order}
        self._blocks = {name: plan.blocks_of(name) for name in order}
        self._dtypes = {name: dtype_of(blocks[0].dtype) for name, blocks in self._blocks.items()}
        self._optimizer = optimizer
        self._mode = mode
        self._finite = finite
        self._rows = rows or None
        self._overlap = Overlap(overlap, Recorder(self._parameters))
        self._earlier: dict[str, SentGradient] | None = {} if outlasting else None
        """What the step before has sent, where that may outlast it."""
        self.own_step = OwnStep(optimizer)
        self._handles: list[RemovableHandle] = []
        self._sent: dict[str, SentGradient] = {}
        self._hyper: HyperParameters | None = None
        self._beginning = threading.Lock()

    def attach(self) -> None:
        """Begin to listen to the backward pass, and to the step of the user's own optimizer."""
        self.own_step.attach()
        if not self._overlap.is_on:
            return
        for name, parameter in self._parameters.items():

            def ready(_: Tensor, name: str = name) -> None:
                self._ready(name)

            handle = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def detach(self) -> None:
        """Stop listening."""
        self.own_step.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes accumulate, without sending."""
        with self._overlap.paused():
            yield

    def step(self, scaling: Scaling | None = None) -> None:
        """Send what has not been sent, and go on with the parameters that follow.

        Parameters
        ----------
        scaling : Scaling, optional
            Where a gradient scaler is at work: what it has found. Gradients leave without its scale, and
            none do where one of them is not finite.

        Raises
        ------
        FleetError
            A gradient or a hyper-parameter changed after it was sent; or the servers failed.
        """
        hyper = hyper_parameters_of(self._optimizer)
        self._overlap.look_back(self._parameters, hyper, scaled=scaling is not None)
        _check_hyper(self._hyper, hyper)
        for name, sent in self._sent.items():
            self._check_unchanged(name, sent)
        if scaling is not None:
            self._check_unscaled()
            leaves = self._rows.gathered.leaves() if self._rows is not None else []
            scaling.undo(
                [*leaves, *(each.grad for each in self._parameters.values() if each.grad is not None)]
            )
        of_rows = self._rows.gathered.sums() if self._rows is not None else {}
        finite = self._lets_step(of_rows) if scaling is None else not scaling.found_inf
        if self._hyper is None:
            self._begin(hyper if finite else NO_STEP)
        absent: list[PlannedBlock] = []
        for name, parameter in self._parameters.items():
            if name in self._sent:
                continue
            if parameter.grad is None or not finite:
                absent += self._blocks[name]
            else:
                self._send(name, parameter.grad)
        self._finish(absent, of_rows if finite else {})
        if self._earlier is not None:
            self._earlier = self._sent
        self._sent, self._hyper = {}, None
        self._overlap.recorder.round += 1

    def _finish(self, absent: Sequence["PlannedBlock"], of_rows: OfRows) -> None:
        """Send the gradients of rows, and end the step."""
        if self._rows is None:
            self._mode.finish(absent)
            return
        if self._mode.queue_rows(of_rows):
            self._mode.finish(absent)
        else:
            self._rows.send(of_rows)
            self._mode.finish(absent)
            self._rows.end_step()
        self._rows.gathered.forget()

    def _lets_step(self, of_rows: OfRows) -> bool:
        if self._finite is None:
            return True
        given = ((name, each.grad) for name, each in self._parameters.items())
        return self._finite.lets_step(
            {name: grad for name, grad in given if grad is not None and grad.layout is torch.strided},
            of_rows,
        )

    def check_earlier(self) -> None:
        """Check that nothing was changed while it was under way; called once the servers have it.

        Raises
        ------
        FleetError
            A gradient was, and what the servers have summed is not what this trainer computed.
        """
        if not self._earlier:
            return
        earlier, self._earlier = self._earlier, {}
        for name, sent in earlier.items():
            if version_of(sent.gradient) != sent.version:
                raise FleetError(
                    f"the gradient of {name} was changed in place after optimizer.step(), while it may still "
                    "have been under way. Call zero_grad() with set_to_none=True, which is its default, or "
                    "use DistributedStrategy(cross_step=False)"
                )

    def check_nothing_in_flight(self, what: str) -> None:
        """Refuse to go on as if gradients had not left.

        Raises
        ------
        FleetError
            Gradients have left, and ``step()`` was not called.
        """
        if self._overlap.has_seen:
            self._overlap.turn_off(f"{what} between a backward() and its step()")
        if self._sent:
            raise FleetError(
                f"{what}, but the gradients of {len(self._sent)} parameters ({next(iter(self._sent))} …) "
                "have been sent already and optimizer.step() did not follow; the other trainers count on "
                f"them. To skip steps, use {NO_OVERLAP}"
            )

    def _ready(self, name: str) -> None:
        """Take a gradient that a backward pass has just accumulated."""
        if not self._overlap.listens:
            return
        if self._overlap.watches:
            self._overlap.see(name, self._parameters[name], hyper_parameters_of(self._optimizer))
            return
        if name in self._sent:
            raise FleetError(
                f"a second backward() reached {name}, whose gradient has been sent already in this step. "
                "Call optimizer.step() after each backward(), or wrap all but the last of several in "
                f"optimizer.no_sync(); or use {NO_OVERLAP}"
            )
        gradient = self._parameters[name].grad
        if gradient is None:
            return
        with self._beginning:  # there is a backward thread for each device
            if self._hyper is None:
                self._begin(hyper_parameters_of(self._optimizer))
        self._send(name, gradient, early=True)

    def _begin(self, hyper: HyperParameters) -> None:
        self._mode.begin(hyper)
        self.check_earlier()
        self._hyper = hyper

    def _send(self, name: str, gradient: Tensor, *, early: bool = False) -> None:
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"the gradient of {name} is sparse ({gradient.layout}), and of no known module; give the "
                "model, fleet.distributed_optimizer(optimizer, strategy, model=model), or use sparse=False"
            )
        check_dtype(name, gradient, self._dtypes[name])
        sent = self._sent[name] = self._overlap.recorder.record(name, gradient, marked=early)
        size = sent.carried.element_size()
        for block in self._blocks[name]:
            self._mode.send(block, sent.payload[block.begin * size : block.end * size])

    def _check_unscaled(self) -> None:
        if self._sent:
            raise FleetError(
                f"a gradient scaler is at work, and the gradient of {next(iter(self._sent))} has been sent "
                f"with its scale. Use {NO_OVERLAP}"
            )

    def _check_unchanged(self, name: str, sent: SentGradient) -> None:
        present = self._parameters[name].grad
        if present is sent.gradient and sent.unchanged:
            return
        raise FleetError(
            f"the gradient of {name} was changed after it had been sent, by clipping or by a GradScaler's "
            f"unscaling for instance, so the change would be lost. Use {NO_OVERLAP}, or clip on the servers "
            "(strategy.grad_clip)"
        )
