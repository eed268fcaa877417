"""Optimizers for scripts, with the names, arguments and operators of Paddle.

`fleet.optim` computes the updates, in one process and on servers. The order is Paddle's: clipping, then
regularization, which is never clipped, then the update. See `fleet.fluid.minimization` for ``minimize``.

The learning rate is a number, or the result of a schedule such as ``layers.exponential_decay``. A ParamAttr
may have a factor for the learning rate, and a regularizer, which replaces the optimizer's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fleet import optim
from fleet.fluid.ir import Attribute, Variable
from fleet.fluid.minimization import Accumulator, Optimizer
from fleet.fluid.names import missing

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradOptimizer",
    "Adam",
    "AdamOptimizer",
    "Momentum",
    "MomentumOptimizer",
    "Optimizer",
    "RMSProp",
    "RMSPropOptimizer",
    "SGDOptimizer",
]


class SGDOptimizer(Optimizer):
    """Stochastic gradient descent, ``w -= lr * g``: Paddle's ``fluid.optimizer.SGD``."""

    type: ClassVar[str] = "sgd"
    torch_class: ClassVar[Any] = optim.SGD


class MomentumOptimizer(Optimizer):
    """Momentum: Paddle's ``fluid.optimizer.Momentum``, implemented by `fleet.optim.Momentum`.

    Parameters
    ----------
    learning_rate : float or ProgramVariable
    momentum : float
    parameter_list : iterable of Variable or str, optional
    use_nesterov : bool
    regularization, grad_clip, name
        See `Optimizer`.
    """

    type: ClassVar[str] = "momentum"
    torch_class: ClassVar[Any] = optim.Momentum
    accumulators: ClassVar[Sequence[Accumulator]] = (Accumulator("Velocity", "velocity"),)
    renamed: ClassVar[Mapping[str, str]] = {"momentum": "mu"}

    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        parameter_list: Iterable[str | Variable] | None = None,
        use_nesterov: bool = False,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        options = {"momentum": float(momentum), "use_nesterov": bool(use_nesterov)}
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, **options)


class AdagradOptimizer(Optimizer):
    """Adagrad: Paddle's ``fluid.optimizer.Adagrad``, implemented by `fleet.optim.Adagrad`.

    Parameters
    ----------
    learning_rate : float or ProgramVariable
    epsilon : float
    parameter_list, regularization, grad_clip, name
        See `Optimizer`.
    initial_accumulator_value : float
        The initial value of the sums of squares.
    """

    type: ClassVar[str] = "adagrad"
    torch_class: ClassVar[Any] = optim.Adagrad
    accumulators: ClassVar[Sequence[Accumulator]] = (
        Accumulator("Moment", "moment", "initial_accumulator_value"),
    )
    renamed: ClassVar[Mapping[str, str]] = {"initial_accumulator_value": ""}

    def __init__(
        self,
        learning_rate: Any,
        epsilon: float = 1e-6,
        parameter_list: Iterable[str | Variable] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        options = {"epsilon": float(epsilon), "initial_accumulator_value": float(initial_accumulator_value)}
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, **options)


class AdamOptimizer(Optimizer):
    """Adam: Paddle's ``fluid.optimizer.Adam``, implemented by `fleet.optim.Adam`.

    Parameters
    ----------
    learning_rate : float or ProgramVariable
    beta1, beta2, epsilon : float
    parameter_list, regularization, grad_clip, name
        See `Optimizer`.
    lazy_mode : bool
        Whether rows of an ``is_sparse`` table without a gradient stay unchanged. Otherwise every step
        processes the whole table, as in Paddle.
    """

    type: ClassVar[str] = "adam"
    torch_class: ClassVar[Any] = optim.Adam
    accumulators: ClassVar[Sequence[Accumulator]] = (
        Accumulator("Moment1", "moment1"),
        Accumulator("Moment2", "moment2"),
        Accumulator("Beta1Pow", "beta1_pow_acc", "beta1", scalar=True),
        Accumulator("Beta2Pow", "beta2_pow_acc", "beta2", scalar=True),
    )
    constants: ClassVar[Mapping[str, Attribute]] = {"min_row_size_to_use_multithread": 1000}

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Iterable[str | Variable] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ) -> None:
        options = {
            "beta1": float(beta1),
            "beta2": float(beta2),
            "epsilon": float(epsilon),
            "lazy_mode": bool(lazy_mode),
        }
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, **options)


class RMSPropOptimizer(Optimizer):
    """RMSProp: Paddle's ``fluid.optimizer.RMSProp``, implemented by `fleet.optim.RMSProp`.

    Parameters
    ----------
    learning_rate : float or ProgramVariable
    rho, epsilon, momentum : float
    centered : bool
    parameter_list, regularization, grad_clip, name
        See `Optimizer`.
    """

    type: ClassVar[str] = "rmsprop"
    torch_class: ClassVar[Any] = optim.RMSProp
    accumulators: ClassVar[Sequence[Accumulator]] = (
        Accumulator("Moment", "momentum"),
        Accumulator("MeanSquare", "mean_square"),
        Accumulator("MeanGrad", "mean_grad"),
    )
    renamed: ClassVar[Mapping[str, str]] = {"rho": "decay"}

    def __init__(
        self,
        learning_rate: Any,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameter_list: Iterable[str | Variable] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        options = {
            "rho": float(rho),
            "epsilon": float(epsilon),
            "momentum": float(momentum),
            "centered": bool(centered),
        }
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, **options)


SGD = SGDOptimizer
Momentum = MomentumOptimizer
Adagrad = AdagradOptimizer
Adam = AdamOptimizer
RMSProp = RMSPropOptimizer

if not TYPE_CHECKING:
    __getattr__ = missing("optimizer")
