"""The optimizer for training loops: a torch.optim optimizer whose steps the servers apply."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer

from fleet.errors import ConfigurationError
from fleet.parameter_server.trainer.own_optimizer import Scaling, update_scaler

if TYPE_CHECKING:
    from fleet.parameter_server.trainer.trainer import Trainer

__all__ = ["DistributedOptimizer"]

_HOOKS: Final = tuple(
    f"_optimizer_{call}_{when}_hooks"
    for call in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
"""The attributes in which torch keeps the hooks of an optimizer."""


class DistributedOptimizer(Optimizer):
    """A torch.optim.Optimizer whose steps the parameter servers apply.

    It shares the param groups of the wrapped optimizer, so that schedulers may be built on either optimizer.
    It also shares the hooks: the methods of this optimizer call a hook registered on either optimizer, with
    this optimizer as the argument.

    Parameters
    ----------
    optimizer : Optimizer
        The user's optimizer.
    minimize : callable
        Captures and transpiles the program for a loss function.
    """

    _step_supports_amp_scaling = True
    """Makes torch.amp.GradScaler call ``step()`` even if gradients are not finite."""

    def __init__(self, optimizer: Optimizer, minimize: Callable[..., None]) -> None:
        _check_step(optimizer)
        # The constructor of the base class adds the param groups by `add_param_group`.
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        for name in _HOOKS:
            setattr(self, name, getattr(optimizer, name))
        self._ready = True
        self._wrapped = optimizer
        self._minimize = minimize
        self._trainer: Trainer | None = None
        self._started = False

    def bind(self, trainer: "Trainer") -> None:
        """Use the given trainer for all later steps."""
        self._trainer = trainer
        self._started = True

    def hand_over(self) -> None:
        """Record that a server in this process now owns the values and the optimizer state."""
        self._started = True

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Run one training step together with the other trainers.

        When this method returns, the parameters have the values that follow the step.

        Raises
        ------
        ConfigurationError
            A closure was given, or there is no session with the servers.
        FleetError
            A gradient or a hyper-parameter was changed after it had been sent.
        PeerLostError, StateLostError
            A server is lost, or has restarted without its state.
        """
        if closure is not None:
            raise ConfigurationError(
                "step(closure) is not supported, because parameter servers cannot evaluate the model; call "
                "backward() yourself, then step()"
            )
        trainer, scaling = self._bound(), Scaling.of(self)
        trainer.step(scaling)
        if scaling is not None and trainer.stepped_nothing:
            update_scaler(self)
        # Unless this attribute is set, a scheduler built on the wrapped optimizer warns about a missing
        # step().
        setattr(self._wrapped, "_opt_called", True)  # noqa: B010 - torch's own, not a declared attribute

    def minimize(self, loss_fn: Callable[..., Any], *originals: object, **named: object) -> None:
        """Build a program of the training step, which an `Executor` runs.

        Parameters
        ----------
        loss_fn : callable
            See `Program.capture`. Afterwards, this replica runs ``fleet.startup_program`` and
            ``fleet.main_program``.
        *originals, **named
            Further arguments of Paddle's method; any that is not None is refused with an error that names it.
        """
        self._minimize(loss_fn, *originals, **named)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; raise an error if this is called between backward() and step().

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        if self._trainer is not None:
            self._trainer.flow.check_nothing_in_flight("zero_grad() was called")
            self._trainer.session.rows.forget_gradients()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients within the block; the next backward pass after it sends the sum."""
        if self._trainer is None:
            yield
            return
        with self._trainer.flow.paused():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Fetch the optimizer state, in GEO this trainer's own, in the format of torch's ``state_dict``."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = self._fetch_state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            if (changed := after(self, state_dict)) is not None:
                state_dict = changed
        return state_dict

    def _fetch_state_dict(self) -> dict[str, Any]:
        names, state = self._bound().names, self._bound().fetch_state()
        groups: list[dict[str, Any]] = []
        numbered: dict[int, dict[str, Any]] = {}
        number = 0
        for group in self.param_groups:
            numbers = range(number, number + len(group["params"]))
            number += len(group["params"])
            for index, parameter in zip(numbers, group["params"], strict=True):
                if parameter in names and names[parameter] in state:
                    numbered[index] = state[names[parameter]]
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(numbers)})
        return {"state": numbered, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of a torch optimizer with the same parameters.

        Every role must call this method with the same state, before ``fleet.init_server()`` and
        ``fleet.init_worker()``: each server uses its part of the state.

        Raises
        ------
        ConfigurationError
            The servers already have the state.
        """
        if self._started:
            raise ConfigurationError(
                "load_state_dict() was called after fleet.init_worker() or fleet.init_server(), when the "
                "parameter servers already had the state; call it earlier, in every role, or load a "
                "checkpoint (fleet.init_server(model_dir), fleet.load_persistables)"
            )
        state_dict = state_dict.copy()  # as in torch, because a hook may change it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := hook(self, state_dict)) is not None:
                state_dict = changed
        with self._hooks_of_the_wrapped_set_aside():
            self._wrapped.load_state_dict(state_dict)
        self.param_groups = self._wrapped.param_groups
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @contextlib.contextmanager
    def _hooks_of_the_wrapped_set_aside(self) -> Iterator[None]:
        """Hide the wrapped optimizer's hooks within the block, so that they are not called twice."""
        for name in _HOOKS:
            setattr(self._wrapped, name, OrderedDict())
        try:
            yield
        finally:
            for name in _HOOKS:
                setattr(self._wrapped, name, getattr(self, name))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, because the servers would not have the new parameters."""
        if self._ready:
            raise ConfigurationError(
                "add_param_group() after distributed_optimizer(): the servers own a fixed set of parameters; "
                "add the group to the torch optimizer first"
            )
        super().add_param_group(param_group)

    def _bound(self) -> "Trainer":
        if self._trainer is None:
            raise ConfigurationError(
                "there is no session with the parameter servers: call fleet.init_worker() on a trainer "
                "before the first step(); a parameter server calls fleet.run_server() and never steps"
            )
        return self._trainer


def _check_step(optimizer: Optimizer) -> None:
    """Reject an optimizer object with its own ``step`` attribute, because servers call the class's method."""
    own = vars(optimizer).get("step")
    # A scheduler's wrapper is allowed, because it only counts calls.
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise ConfigurationError(
            f"the {type(optimizer).__name__} passed to fleet.distributed_optimizer() has a step() set on the "
            "object, which the servers would not call; expected a subclass that overrides step(), or hooks: "
            "optimizer.register_step_pre_hook(), register_step_post_hook()"
        )
