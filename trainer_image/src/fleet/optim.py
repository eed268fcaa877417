"""Paddle's optimizers as torch.optim classes, with Paddle's formulas, defaults and state names.

They differ from the classes of torch.optim in the position of epsilon, in their defaults, and in L1
regularization, which torch does not have. Each parameter is stepped independently, element by element, so
that parameter servers can step any part of it. Options and state have the names of Paddle's operators.

A sparse gradient steps all rows, as a dense gradient with zeros does. Only ``Adam(lazy_mode=True)`` steps
just the rows of the gradient. With regularization a gradient is always dense, because every row decays.

Each formula is a static method `update`, which the rules of `fleet.tables` use too.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

__all__ = ["SGD", "Adagrad", "Adam", "Momentum", "Optimizer", "RMSProp", "adam_rate", "float32"]

_SINGLE: Final = struct.Struct("f")


def float32(value: float) -> float:
    """Round a number to float32, the type of Paddle's attributes.

    Raises
    ------
    OverflowError
        The number is finite but too large for float32.
    """
    rounded: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    return rounded


class Optimizer(torch.optim.Optimizer):
    """The base class of Paddle's optimizers, which clips and regularizes gradients before an update.

    Parameters
    ----------
    params : iterable of Parameter or of dict
    options : mapping
        The default options of param groups, with ``lr``, ``weight_decay`` (L2), ``l1_decay`` (L1) and
        ``clip_value``, the least and the greatest element of a clipped gradient, or None.

    Raises
    ------
    ValueError
        An option is not a finite number, or the bounds of ``clip_value`` are in descending order.
    """

    tensors: ClassVar[Mapping[str, str | None]]
    """For each state tensor of the parameter's shape, the option with its initial value; None for 0."""

    def __init__(self, params: Any, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if name != "clip_value" and not isinstance(value, bool) and not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}: {name} is {value}, expected a finite number")
        if (bounds := options["clip_value"]) is not None:
            low, high = bounds
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(
                    f"{type(self).__name__}: clip_value is {bounds}, expected None, or two finite numbers, "
                    "the smaller first"
                )
        super().__init__(params, dict(options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another optimizer of the same class.

        Parameters
        ----------
        state_dict : dict

        Raises
        ------
        ValueError
            A param group lacks an option of this class.
        """
        kind = type(self).__name__
        for index, group in enumerate(state_dict["param_groups"]):
            if missing := [name for name in self.defaults if name not in group]:
                raise ValueError(
                    f"{kind}: param group {index} of the loaded state has no {', '.join(missing)}; expected "
                    f"the state_dict() of a fleet.optim.{kind}, or give the group that option, such as "
                    f"{missing[0]}={self.defaults[missing[0]]}"
                )
        super().load_state_dict(state_dict)

    @staticmethod
    def update(value: Tensor, grad: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Apply the subclass's formula to a value and its state in place; `grad` is already regularized."""
        raise NotImplementedError

    @staticmethod
    def dense(options: Mapping[str, Any]) -> bool:
        """Return whether a step also changes rows without a gradient, or the state of such rows."""
        return is_regularized(options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Parameters
        ----------
        closure : callable, optional
            Recomputes the loss and its gradients.

        Returns
        -------
        object or None
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    self._step(parameter, clipped(grad, group), self._state_of(parameter, group), group)
        return loss

    def _step(self, value: Tensor, grad: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> None:
        # Paddle's sparse kernels of Momentum and RMSProp lose gradients if ids are not sorted. A dense
        # gradient gives the result that they should have.
        if grad.is_sparse:
            grad = grad.to_dense()
        self.update(value, regularized(grad, value, options), state, options)

    def _state_of(self, parameter: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            for name, initial in self.tensors.items():
                value = float32(options[initial]) if initial else 0.0
                state[name] = torch.full_like(parameter, value, memory_format=torch.preserve_format)
        return state


def is_regularized(options: Mapping[str, Any]) -> bool:
    """Return whether the options include L1 or L2 regularization."""
    return bool(options["weight_decay"] or options["l1_decay"])


def clipped(grad: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return a gradient with its elements clamped to the bounds in the option ``clip_value``, if set."""
    if (bounds := options["clip_value"]) is None:
        return grad
    if not grad.is_sparse:
        return grad.clamp(*bounds)
    grad = grad.coalesce()
    values = grad.values().clamp(*bounds)
    indices, shape = grad.indices(), grad.shape
    # The indices are those of a valid gradient, so sorting and checking them again would only take time.
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def regularized(grad: Tensor, value: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return a dense gradient plus the gradients of the L1 and L2 penalties, if any."""
    if l2 := options["weight_decay"]:
        grad = grad.add(value, alpha=l2)
    if l1 := options["l1_decay"]:
        grad = grad.add(value.sign(), alpha=l1)
    return grad


class SGD(Optimizer):
    """Paddle's ``fluid.optimizer.SGD``: ``w -= lr * g``.

    Parameters
    ----------
    params : iterable of Parameter or of dict
    lr : float
    weight_decay, l1_decay : float
        Coefficients of L2 and L1 regularization.
    clip_value : (float, float), optional
        The bounds of the elements of a gradient, which is clipped before it is regularized.
    """

    tensors: ClassVar[Mapping[str, str | None]] = {}

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        *,
        weight_decay: float = 0.0,
        l1_decay: float = 0.0,
        clip_value: tuple[float, float] | None = None,
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "l1_decay": l1_decay}
        super().__init__(params, {**options, "clip_value": clip_value})

    @staticmethod
    def update(value: Tensor, grad: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Apply SGD's formula; see `Optimizer`."""
        del state
        value.add_(grad, alpha=-options["lr"])

    def _step(self, value: Tensor, grad: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> None:
        if is_regularized(options):
            super()._step(value, grad, state, options)
        else:
            value.add_(grad, alpha=-options["lr"])  # of a sparse gradient, only its rows


class Momentum(Optimizer):
    """Paddle's ``fluid.optimizer.Momentum``: ``v = mu * v + g``, then ``w -= lr * v``.

    With Nesterov's method, ``w -= lr * (g + mu * v)``.

    Parameters
    ----------
    params : iterable of Parameter or of dict
    lr : float
    momentum : float
        Paddle's ``mu``.
    use_nesterov : bool
    weight_decay, l1_decay : float
        Coefficients of L2 and L1 regularization.
    clip_value : (float, float), optional
        The bounds of the elements of a gradient, which is clipped before it is regularized.
    """

    tensors: ClassVar[Mapping[str, str | None]] = {"velocity": None}

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        momentum: float = 0.9,
        *,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        l1_decay: float = 0.0,
        clip_value: tuple[float, float] | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "use_nesterov": use_nesterov}
        options |= {"weight_decay": weight_decay, "l1_decay": l1_decay}
        super().__init__(params, {**options, "clip_value": clip_value})

    @staticmethod
    def update(value: Tensor, grad: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Apply Momentum's formula; see `Optimizer`."""
        velocity, momentum = state["velocity"], options["momentum"]
        velocity.mul_(momentum).add_(grad)
        ahead = grad.add(velocity, alpha=momentum) if options["use_nesterov"] else velocity
        value.add_(ahead, alpha=-options["lr"])

    @staticmethod
    def dense(options: Mapping[str, Any]) -> bool:
        """Return True, because velocities also change rows that have no gradient."""
        del options
        return True


class Adagrad(Optimizer):
    """Paddle's ``fluid.optimizer.Adagrad``: ``s += g * g``, then ``w -= lr * g / (sqrt(s) + epsilon)``.

    Parameters
    ----------
    params : iterable of Parameter or of dict
    lr : float
    epsilon : float
    initial_accumulator_value : float
        The initial value of ``s``.
    weight_decay, l1_decay : float
        Coefficients of L2 and L1 regularization.
    clip_value : (float, float), optional
        The bounds of the elements of a gradient, which is clipped before it is regularized.
    """

    tensors: ClassVar[Mapping[str, str | None]] = {"moment": "initial_accumulator_value"}

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        *,
        epsilon: float = 1e-6,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        l1_decay: float = 0.0,
        clip_value: tuple[float, float] | None = None,
    ) -> None:
        options = {"lr": lr, "epsilon": epsilon, "initial_accumulator_value": initial_accumulator_value}
        options |= {"weight_decay": weight_decay, "l1_decay": l1_decay}
        super().__init__(params, {**options, "clip_value": clip_value})

    @staticmethod
    def update(value: Tensor, grad: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Apply Adagrad's formula; see `Optimizer`."""
        moment = state["moment"].addcmul_(grad, grad)
        value.addcdiv_(grad, moment.sqrt().add_(options["epsilon"]), value=-options["lr"])

    def _step(self, value: Tensor, grad: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> None:
        if grad.is_sparse and not is_regularized(options):
            _update_rows(self, value, grad, state, options)
        else:
            super()._step(value, grad, state, options)


class Adam(Optimizer):
    """Paddle's ``fluid.optimizer.Adam``, which adds epsilon before, not after, the bias correction.

    ``w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)``

    Parameters
    ----------
    params : iterable of Parameter or of dict
    lr : float
    beta1, beta2 : float
        Rounded to float32 like Paddle's attributes, because this visibly affects the bias correction.
    epsilon : float
    lazy_mode : bool
        Whether a sparse gradient steps only its own rows, and leaves the moments of other rows unchanged.
    weight_decay, l1_decay : float
        Coefficients of L2 and L1 regularization; with either, gradients are dense.
    clip_value : (float, float), optional
        The bounds of the elements of a gradient, which is clipped before it is regularized.
    """

    tensors: ClassVar[Mapping[str, str | None]] = {"moment1": None, "moment2": None}

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        lazy_mode: bool = False,
        weight_decay: float = 0.0,
        l1_decay: float = 0.0,
        clip_value: tuple[float, float] | None = None,
    ) -> None:
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "lazy_mode": lazy_mode}
        options |= {"weight_decay": weight_decay, "l1_decay": l1_decay}
        super().__init__(params, {**options, "clip_value": clip_value})

    @staticmethod
    def update(value: Tensor, grad: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Apply Adam's formula; see `Optimizer`. The option ``rate`` is the result of `adam_rate`."""
        beta1, beta2 = float32(options["beta1"]), float32(options["beta2"])
        moment1 = state["moment1"].mul_(beta1).add_(grad, alpha=1.0 - beta1)
        moment2 = state["moment2"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        value.addcdiv_(moment1, moment2.sqrt().add_(options["epsilon"]), value=-options["rate"])

    @staticmethod
    def dense(options: Mapping[str, Any]) -> bool:
        """Return True unless lazy mode is on and there is no regularization."""
        return is_regularized(options) or not options["lazy_mode"]

    def _step(self, value: Tensor, grad: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> None:
        power1, power2 = state["beta1_pow_acc"], state["beta2_pow_acc"]
        rate = adam_rate(options["lr"], power1.item(), power2.item())
        if grad.is_sparse and not self.dense(options):
            _update_rows(self, value, grad, state, {**options, "rate": rate})
        else:
            super()._step(value, grad, state, {**options, "rate": rate})
        # After a sparse update too. Paddle's sparse kernel advances the powers first, so its bias correction
        # is one step ahead; that fault is not kept.
        power1.mul_(options["beta1"])
        power2.mul_(options["beta2"])

    def _state_of(self, parameter: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._state_of(parameter, options)
        if "beta1_pow_acc" not in state:
            for name in ("beta1", "beta2"):
                # Of Paddle's shape, and on the CPU, so that reading it does not wait for a GPU.
                state[f"{name}_pow_acc"] = torch.full((1,), options[name], dtype=torch.float32, device="cpu")
        return state


def adam_rate(rate: float, power1: float, power2: float) -> float:
    """Return Adam's learning rate with bias correction, given beta1**t and beta2**t."""
    return float(rate) * math.sqrt(1.0 - power2) / (1.0 - power1)


class RMSProp(Optimizer):
    """Paddle's ``fluid.optimizer.RMSProp``, which adds epsilon under the square root.

    ``s = rho * s + (1 - rho) * g * g``, then ``m = momentum * m + lr * g / sqrt(s + epsilon)``, and
    ``w -= m``. If centered, the square of the mean gradient is subtracted from ``s`` in the root.

    Parameters
    ----------
    params : iterable of Parameter or of dict
    lr : float
    rho, epsilon, momentum : float
    centered : bool
    weight_decay, l1_decay : float
        Coefficients of L2 and L1 regularization.
    clip_value : (float, float), optional
        The bounds of the elements of a gradient, which is clipped before it is regularized.
    """

    # Paddle's operator has the mean of the gradient even if it is not centered.
    tensors: ClassVar[Mapping[str, str | None]] = {"momentum": None, "mean_square": None, "mean_grad": None}

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        *,
        centered: bool = False,
        weight_decay: float = 0.0,
        l1_decay: float = 0.0,
        clip_value: tuple[float, float] | None = None,
    ) -> None:
        options = {"lr": lr, "rho": rho, "epsilon": epsilon, "momentum": momentum, "centered": centered}
        options |= {"weight_decay": weight_decay, "l1_decay": l1_decay}
        super().__init__(params, {**options, "clip_value": clip_value})

    @staticmethod
    def update(value: Tensor, grad: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Apply RMSProp's formula; see `Optimizer`."""
        rho = float32(options["rho"])
        square = state["mean_square"].mul_(rho).addcmul_(grad, grad, value=1.0 - rho)
        if options["centered"]:
            mean = state["mean_grad"].mul_(rho).add_(grad, alpha=1.0 - rho)
            square = square.addcmul(mean, mean, value=-1.0)
        root = square.add(options["epsilon"]).sqrt_()
        momentum = state["momentum"].mul_(options["momentum"]).addcdiv_(grad, root, value=options["lr"])
        value.sub_(momentum)

    @staticmethod
    def dense(options: Mapping[str, Any]) -> bool:
        """Return True, because the mean square decays and momentum applies in rows without a gradient too."""
        del options
        return True


def _update_rows(
    optimizer: Optimizer, value: Tensor, grad: Tensor, state: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Update only the rows that have a gradient."""
    grad = grad.coalesce()
    (rows,) = grad.indices()
    part, of_rows = value[rows], {name: state[name][rows] for name in optimizer.tensors}
    optimizer.update(part, grad.values(), of_rows, options)
    value[rows] = part
    for name, entry in of_rows.items():
        state[name][rows] = entry
