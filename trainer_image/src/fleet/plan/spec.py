"""Training specifications: plain data that describes a process's training; plans are derived from it.

`fleet.plan.capture` derives a specification from the PyTorch objects. It holds no PyTorch object, so it can
be written as text, and processes can compare their specifications.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fleet.plan.clipping import GradClip
from fleet.plan.optimizers import KERNEL_FLAGS, HyperParameter, has_coupled_decay, kind_of

__all__ = ["LOSS", "GroupSpec", "ParameterSpec", "TableSpec", "TrainingSpec"]

LOSS: Final = "loss"
"""The name of the loss among a step's results."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The specification of a trained parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The torch dtype's name without its module: ``float32``."""
    group: int
    """The index of the parameter's param group in the optimizer."""

    @property
    def grad(self) -> str:
        """The name of the parameter's gradient."""
        return f"{self.name}@GRAD"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The specification of a param group: its optimizer, its options, and whether servers can run it."""

    index: int
    optimizer: str
    """The optimizer's class: ``torch.optim.sgd.SGD``."""
    options: Mapping[str, HyperParameter]
    """Every option of the group at capture, ``lr``, ``weight_decay`` and kernel flags included."""
    elementwise: bool
    """Whether updating two slices is bitwise-identical to updating the whole parameter."""
    refusal: str = ""
    """Why parameter servers cannot run this step; empty if they can."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The dtypes of the options that are tensors; the exact result of a step depends on them."""

    @property
    def kind(self) -> str:
        """Paddle's name for the optimizer, such as ``sgd``, ``momentum`` or ``adam``."""
        return kind_of(self.optimizer, self.options)

    @property
    def coupled(self) -> bool:
        """True if weight decay is added to the gradient before the optimizer uses it."""
        return has_coupled_decay(self.optimizer, self.options)

    @property
    def fact(self) -> str:
        """The class and the non-numeric options, which must be equal in every process."""
        # Kernel flags depend on the device, and servers and trainers may have different devices.
        structural = {
            name: value
            for name, value in sorted(self.options.items())
            if name not in KERNEL_FLAGS and (value is None or isinstance(value, bool | str))
        }
        options = ", ".join(f"{name}={value}" for name, value in structural.items())
        return f"{self.kind}: {self.optimizer}({options})"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The specification of a table whose rows the parameter servers update."""

    name: str
    num_embeddings: int
    """The number of ids; -1 if any id may be looked up."""
    dimension: int
    own: bool
    """Whether trainers also hold the table, as the weight of a module with sparse gradients."""
    fact: str
    """The properties of the table that must be equal in every process and in a checkpoint."""
    placed: bool = False
    """Whether a dispatcher also assigns blocks of this table to servers, as in Paddle's programs."""


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """The specification of a process's training.

    Attributes
    ----------
    parameters : tuple of ParameterSpec
        In order of creation.
    groups : tuple of GroupSpec
        The param groups of `parameters`, by index.
    tables : tuple of TableSpec
        By name.
    clip : ClipGradByValue, ClipGradByNorm, ClipGradByGlobalNorm or None
        How gradients are clipped.
    feeds : tuple of str
        The arguments of the loss function, after the model.
    """

    parameters: tuple[ParameterSpec, ...]
    groups: tuple[GroupSpec, ...]
    tables: tuple[TableSpec, ...] = ()
    clip: GradClip | None = None
    feeds: tuple[str, ...] = ()

    @property
    def by_name(self) -> tuple[ParameterSpec, ...]:
        """The parameters, sorted by name in code point order."""
        return tuple(sorted(self.parameters, key=lambda parameter: parameter.name))

    def group(self, index: int) -> GroupSpec:
        """Return the param group at an index."""
        return next(group for group in self.groups if group.index == index)

    def agreement(self) -> dict[str, str]:
        """Return, by name, the facts that must be equal in all processes that train together.

        The facts are the names, shapes, dtypes and param groups of the parameters, each table, the class and
        structural hyper-parameters of each group, and how gradients are clipped. Numbers such as the learning
        rate may change during training, so they are compared at each step instead.
        """
        agreement = {f"table {table.name}": table.fact for table in self.tables}
        if self.clip is not None:
            agreement["grad_clip"] = repr(self.clip)
        for parameter in self.by_name:
            shape = ", ".join(map(str, parameter.shape))
            agreement[f"parameter {parameter.name}"] = (
                f"{parameter.dtype}[{shape}] in param group {parameter.group}"
            )
            agreement[f"optimizer of param group {parameter.group}"] = self.group(parameter.group).fact
        return agreement
