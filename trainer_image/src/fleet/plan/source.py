"""The PyTorch objects that a job trains, and checks of these objects.

Functions import torch when they need it, so that programs and plans can be read and printed without torch.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "; or train in the mode geo, in which each trainer steps its own copy (config.geo_sgd_mode = True)"
)


@dataclass(frozen=True, eq=False)
class CapturedTable:
    """A table whose rows the parameter servers update."""

    name: str
    declared: Any
    """The object whose `placeholder` the optimizer holds: a `fleet.nn.DistributedTable` or an `OwnTable`."""
    config: Any
    """The table's configuration on servers: a `fleet.tables.TableConfig`, or the `OwnTable` itself."""
    group: int | None
    """The param group whose options apply in each step; None if the table has its own rule."""


@dataclass(frozen=True, eq=False)
class OwnTable:
    """A table that trainers also store: the weight of an embedding or embedding bag with ``sparse=True``."""

    name: str
    placeholder: "Parameter"
    """The weight of the embedding."""
    optimizer_class: "type[Optimizer]"
    options: Mapping[str, Any]
    """The options of the weight's param group."""

    @property
    def num_embeddings(self) -> int:
        """The number of rows."""
        return int(self.placeholder.shape[0])

    @property
    def dimension(self) -> int:
        """The number of elements in a row."""
        return int(self.placeholder.shape[1])


@dataclass(frozen=True, eq=False)
class Source:
    """The PyTorch objects of a training run, which a plan cannot store as data."""

    optimizer: "Optimizer"
    parameters: "Mapping[str, Parameter]"
    """The trained parameters by name, in order of creation."""
    module: "Module | None" = None
    loss_fn: Callable[..., Any] | None = None
    named: bool = True
    """False if the names are only positions (``param_0_3``), because the user did not name parameters."""
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
    """Return the outermost module in this process that contains all of an optimizer's parameters.

    The module gives the parameters the names that the script uses. A wrapper of ``torch.compile`` is ignored.
    Every replica runs the same script, so it finds the same module.

    Returns
    -------
    Module or None
        None if there is no such module, if several modules share the parameters, or if the optimizer already
        has names.
    """
    if all("param_names" in group for group in optimizer.param_groups):
        return None
    wanted = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not wanted:
        return None
    level: list[Any] = [next(iter(wanted.values()))]
    above: dict[int, Module] = {}
    while level:  # a module that holds every parameter is above any one of them
        level = [each for each in _modules_around(level) if id(each) not in above]
        above.update((id(each), each) for each in level)
    inside = {id(child) for module in above.values() for child in module.children()}
    outermost = [module for module in above.values() if id(module) not in inside]
    holding = [module for module in outermost if wanted.keys() <= {id(each) for each in module.parameters()}]
    if len(holding) != 1:
        return None
    return without_wrapper(holding[0])


def _modules_around(children: "Sequence[Module | Parameter]") -> "list[Module]":
    """Return the modules that contain one of the given objects as their own parameter or submodule."""
    from torch.nn import Module

    # gc.get_objects() would be shorter. It would also hold the tuples that other threads are building, which
    # CPython then cannot resize: tuple(generator) raises SystemError in those threads.
    modules: list[Module] = []
    holders: list[Any] = list(children)
    for _ in range(3):  # the dict of parameters or of children, the module's __dict__, the module
        found = gc.get_referrers(*holders) if holders else []
        # An object may report a `__class__` other than its type, and its __init__ may not have run yet.
        modules += [each for each in found if issubclass(type(each), Module) and "_modules" in vars(each)]
        holders = [each for each in found if issubclass(type(each), dict)]
    wanted = {id(each) for each in children}
    return [
        each
        for each in {id(module): module for module in modules}.values()
        if any(id(held) in wanted for held in (*each.children(), *each.parameters(recurse=False)))
    ]


def without_wrapper(module: "Module") -> "Module":
    """Return the module inside a ``torch.compile`` wrapper, or the module itself."""
    from torch.nn import Module

    wrapped = getattr(module, "_orig_mod", None)
    return wrapped if isinstance(wrapped, Module) else module


def parameter_names(optimizer: "Optimizer", model: "Module | None") -> "tuple[dict[Parameter, str], bool]":
    """Return the name of each parameter, and whether the user chose the names."""
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
    """A check for parameters that a script trains without exchanging their gradients.

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
        """Raise an error if a step would change a parameter whose gradient is not exchanged.

        Raises
        ------
        ConfigurationError
            The step would change another parameter; the message names it.
        """
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"{name} has a gradient, but was frozen when fleet.distributed_optimizer was called, so "
                    "the gradient is not exchanged; let the parameter require gradients at that call, and "
                    "freeze it after fleet.init_worker() for as long as it should not be trained"
                )
        if self._count() != self._number:
            raise ConfigurationError(
                f"the optimizer has {self._count()} parameters, and had {self._number} when "
                "fleet.distributed_optimizer was called, so the gradients of the new ones are not "
                "exchanged; call add_param_group() before it"
            )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


def _position(group: int, index: int) -> str:
    return f"parameter {index} of param group {group}"


def refuse_forward_writes(source: Source | None, *, steps_alone: bool) -> None:
    """Raise an error if a known module's forward pass changes one of its trained parameters.

    Parameters
    ----------
    source : Source or None
    steps_alone : bool
        Whether a trainer updates its own values, as in GEO. Even then, rows of tables are copies.

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
            "changes its weight on this trainer alone, and the values of the next step would overwrite the "
            "change; leave max_norm out, and apply torch.renorm to the module's "
            f"output{'' if id(module.weight) in rows else _IN_GEO}"
        )
