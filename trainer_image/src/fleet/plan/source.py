"""The PyTorch objects that a job trains, and checks on them.

Functions import torch when they need it, so that programs and plans can be read and printed without torch.
"""

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fleet.errors import ConfigurationError, TranspileError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

__all__ = [
    "WITHOUT_NAMES",
    "CapturedTable",
    "LeftOut",
    "OwnTable",
    "Source",
    "find_module",
    "parameter_names",
    "refuse_forward_writes",
    "without_wrapper",
]

WITHOUT_NAMES = (
    "parameters are named by position in the optimizer (param_0_0, …), as no single module holds all of "
    "them; model=model in fleet.distributed_optimizer, or an optimizer that is built from named parameters, "
    "gives them names"
)
"""The message that a trainer logs if its parameters have no names."""
_IN_GEO: Final = (
    "; or train in the mode geo, in which trainers step by themselves (config.geo_sgd_mode = True)"
)


@dataclass(frozen=True, eq=False)
class CapturedTable:
    """A table whose rows the parameter servers step."""

    name: str
    declared: Any
    """The owner of its `placeholder`: a `fleet.nn.DistributedTable` of the model, or an `OwnTable`."""
    config: Any
    """Its configuration on servers: a `fleet.tables.TableConfig`, or the `OwnTable`."""
    group: int | None
    """The param group whose options apply in each step; None if the table has its own rule."""


@dataclass(frozen=True, eq=False)
class OwnTable:
    """A table that trainers also hold: the weight of an embedding, or a bag, with ``sparse=True``."""

    name: str
    placeholder: "Parameter"
    """The weight."""
    optimizer_class: "type[Optimizer]"
    options: Mapping[str, Any]
    """The options of its param group."""

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return int(self.placeholder.shape[0])

    @property
    def dimension(self) -> int:
        """Number of elements in a row."""
        return int(self.placeholder.shape[1])


@dataclass(frozen=True, eq=False)
class Source:
    """The live PyTorch objects of a training run, which a plan cannot hold as data."""

    optimizer: "Optimizer"
    parameters: "Mapping[str, Parameter]"
    """The trained parameters by name, in order of creation."""
    module: "Module | None" = None
    loss_fn: Callable[..., Any] | None = None
    named: bool = True
    """False if the names are only positions (``param_0_3``), because the user gave none."""
    tables: tuple[CapturedTable, ...] = ()
    """The tables of the model, sorted by name."""

    @property
    def own_tables(self) -> "Mapping[str, Parameter]":
        """The weights of the tables that trainers also hold, by name."""
        return {
            table.name: table.declared.placeholder
            for table in self.tables
            if isinstance(table.declared, OwnTable)
        }


def find_module(optimizer: "Optimizer") -> "Module | None":
    """Return the outermost module of this process that holds all of an optimizer's parameters.

    The module gives the parameters the names that the script uses. A wrapper of ``torch.compile`` is ignored.
    Every replica runs the same script, and so finds the same module.

    Returns
    -------
    Module or None
        None if there is no such module, if several modules share the parameters, or if the optimizer already
        has names.
    """
    from torch.nn import Module

    if all("param_names" in group for group in optimizer.param_groups):
        return None
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # An object may report a `__class__` other than its type, and its __init__ may not have run yet.
    found = (each for each in gc.get_objects() if issubclass(type(each), Module))
    modules = [each for each in found if "_modules" in vars(each)]
    inside = {id(child) for module in modules for child in module.children()}
    outermost = [module for module in modules if id(module) not in inside]
    holding = [module for module in outermost if wanted <= {id(each) for each in module.parameters()}]
    if len(holding) != 1:
        return None
    return without_wrapper(holding[0])


def without_wrapper(module: "Module") -> "Module":
    """Return the module inside a ``torch.compile`` wrapper, or the module itself."""
    from torch.nn import Module

    wrapped = getattr(module, "_orig_mod", None)
    return wrapped if isinstance(wrapped, Module) else module


def parameter_names(optimizer: "Optimizer", model: "Module | None") -> "tuple[dict[Parameter, str], bool]":
    """Return the name of each parameter, and whether the names come from the user."""
    if model is not None:
        return {parameter: name for name, parameter in model.named_parameters()}, True
    names: dict[Parameter, str] = {}
    named = all("param_names" in group for group in optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        given = group["param_names"] if named else [f"param_{index}_{i}" for i in range(len(group["params"]))]
        names.update(zip(group["params"], given, strict=True))
    taken: set[str] = set()
    for name in names.values():
        if name in taken:
            raise TranspileError(f"two parameters are named {name!r}; each needs a name of its own")
        taken.add(name)
    return names, named


class LeftOut:
    """Detects parameters that a script trains without exchanging their gradients.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    exchanged : iterable of Tensor
        The optimizer's parameters whose gradients are exchanged.
    module : torch.nn.Module, optional
        Provides the names of parameters.
    """

    def __init__(
        self,
        optimizer: "Optimizer",
        exchanged: "Iterable[Tensor]",
        module: "Module | None" = None,
    ) -> None:
        self._optimizer = optimizer
        known = {id(parameter) for parameter in exchanged}
        names = {id(each): name for name, each in module.named_parameters()} if module is not None else {}
        self._frozen = [
            (names.get(id(parameter), _position(number, index)), parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in known
        ]
        self._number = self._count()

    def check(self) -> None:
        """Check that a step changes only exchanged parameters.

        Raises
        ------
        ConfigurationError
            The step would change another parameter; the message names it.
        """
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"{name} has a gradient, and was frozen when fleet.distributed_optimizer was called, so "
                    "the gradient is not exchanged; let the parameter require gradients there, and freeze it "
                    "after fleet.init_worker() for as long as it is not to learn"
                )
        if self._count() != self._number:
            raise ConfigurationError(
                f"the optimizer has {self._count()} parameters, and had {self._number} when "
                "fleet.distributed_optimizer was called, so those that have come since are not exchanged; "
                "call add_param_group() before it"
            )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


def _position(group: int, index: int) -> str:
    return f"parameter {index} of param group {group}"


def refuse_forward_writes(source: Source | None, *, steps_alone: bool) -> None:
    """Raise if a known module's forward pass changes one of its trained parameters.

    Parameters
    ----------
    source : Source or None
    steps_alone : bool
        Whether a trainer steps its own values, as in GEO. Rows of tables are copies even then.

    Raises
    ------
    TranspileError
        There is such a module; the message names it.
    """
    if source is None or source.module is None:
        return
    import torch  # imported here, so that programs can be read and printed without torch

    rows = {id(each) for each in source.own_tables.values()}
    blocks = set() if steps_alone else {id(each) for each in source.parameters.values()}
    for name, module in source.module.named_modules():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if module.max_norm is None or id(module.weight) not in rows | blocks:
            continue
        raise TranspileError(
            f"module {name or type(module).__name__} has max_norm={module.max_norm}: its forward pass "
            "writes to its weight on this trainer alone, and the values of the next step would overwrite "
            "that; leave max_norm out, and apply torch.renorm to what the module returns"
            f"{'' if id(module.weight) in rows else _IN_GEO}"
        )
