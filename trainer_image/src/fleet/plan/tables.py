"""Plans of tables, and the search for the tables of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fleet.errors import TranspileError
from fleet.plan.config import DistributedMode
from fleet.plan.optimizers import read_hyper_parameters
from fleet.plan.source import CapturedTable, OwnTable, Source
from fleet.plan.spec import TableSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.nn import Parameter

    from fleet.tables import TableConfig
    from fleet.wire import HyperParameters

__all__ = ["TablePlan", "find_tables", "placeholders_of", "served", "shards_on", "table_plans", "table_spec"]


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The plan of a table; every server stores some of its shards."""

    number: int
    """The table's position among all tables, sorted by name; the same on every trainer and server."""
    config: "TableConfig"
    group: int | None
    """The param group whose options apply in each step; None if the table has its own rule."""
    own: "Parameter | None" = None
    """The module's weight, if trainers also hold the table and receive its changed rows."""
    warm_start: "Callable[[], tuple[Any, Any]] | None" = None
    """A function that servers call for the table's initial ids and vectors."""

    @property
    def name(self) -> str:
        """The table's name."""
        return self.config.name

    @property
    def row_bytes(self) -> int:
        """The size of a row on the wire in bytes. Rows are sent as float32, regardless of their row type."""
        return 4 * self.config.dimension

    def options(self, hyper_parameters: "HyperParameters") -> "Mapping[str, Any]":
        """Return a step's options from the table's param group; no options if the table has its own rule."""
        from fleet.tables.rules import options_of  # programs need no torch

        return {} if self.group is None else options_of(self.config.rule, hyper_parameters[self.group])


def find_tables(
    optimizer: "torch.optim.Optimizer", model: "torch.nn.Module | None", *, served: bool = True
) -> tuple[CapturedTable, ...]:
    """Return the tables of a model, sorted by name, with their param groups.

    Without servers (`served` is False), an embedding with sparse gradients is an ordinary parameter.

    Raises
    ------
    TranspileError
        Two tables have the same name, or the optimizer holds a table that belongs to no known model.
    ConfigurationError
        A table has neither a rule nor an optimizer; see `fleet.nn.DistributedTable.config`.
    """
    modules = model.modules() if model is not None else ()
    declared = {id(each): each for module in modules for each in getattr(module, "distributed_tables", ())}
    groups = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    found = _own_tables(optimizer, model, groups) if served else {}
    for table in declared.values():
        if table.name in found:
            raise TranspileError(
                f"two tables are named {table.name!r}; give each its own name, or share one table: "
                "DistributedEmbedding(…, table=other.table)"
            )
        index = groups.get(id(table.placeholder)) if table.rule is None else None
        options = None if index is None else read_hyper_parameters(optimizer, optimizer.param_groups[index])
        config = table.config(type(optimizer), options)
        found[table.name] = CapturedTable(table.name, table, config, index)
    _refuse_unknown(optimizer, placeholders_of(found.values()))
    return tuple(found[name] for name in sorted(found))


def placeholders_of(tables: Iterable[CapturedTable]) -> frozenset[int]:
    """Return the `id()` of each parameter that is a table's placeholder."""
    return frozenset(id(table.declared.placeholder) for table in tables)


def _own_tables(
    optimizer: "torch.optim.Optimizer", model: "torch.nn.Module | None", groups: Mapping[int, int]
) -> dict[str, CapturedTable]:
    """Return the weights with sparse gradients that the optimizer updates.

    These are the weights of torch's modules, and the `sparse_weights` of a built program's module.
    """
    import torch  # imported here, so that programs can be read and printed without torch

    names = {id(weight): name for name, weight in model.named_parameters()} if model is not None else {}
    found: dict[str, CapturedTable] = {}
    for module in model.modules() if model is not None else ():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            weights = [module.weight] if module.sparse else []
        else:
            weights = getattr(module, "sparse_weights", [])
        for weight in weights:
            index = groups.get(id(weight))
            if index is None or not isinstance(weight, torch.nn.Parameter) or not weight.requires_grad:
                continue
            name = names[id(weight)]
            if weight.dtype is not torch.float32:
                raise TranspileError(
                    f"{name} has sparse gradients of {weight.dtype}; servers step rows in torch.float32: use "
                    "this dtype, or sparse=False"
                )
            options = read_hyper_parameters(optimizer, optimizer.param_groups[index])
            table = OwnTable(name, weight, type(optimizer), options)
            found[name] = CapturedTable(name, table, table, index)
    return found


def _refuse_unknown(optimizer: "torch.optim.Optimizer", known: frozenset[int]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            table = getattr(parameter, "fleet_table", "")
            if table and id(parameter) not in known:
                raise TranspileError(
                    f"parameter {position} of the optimizer's param group {index} is the placeholder of the "
                    f"table {table}, and no known module reads this table; pass the model: "
                    "fleet.distributed_optimizer(optimizer, strategy, model=model)"
                )


def shards_on(server: int, num_servers: int) -> tuple[int, ...]:
    """Return the virtual shards of each table on a server."""
    from fleet.tables import Placement  # imported here, so that plans can be read without torch

    return Placement.over(num_servers).shards_of(server)


def table_plans(names: "Sequence[str]", source: Source | None) -> tuple[TablePlan, ...]:
    """Return the plans of a job's tables.

    Parameters
    ----------
    names : sequence of str
        In the order of their numbers.
    source : Source or None
        Holds the tables.

    Raises
    ------
    TranspileError
        The source has no table with one of the names, for example because the program was read from text.
    """
    known = {each.name: each for each in source.tables} if source is not None else {}
    if unknown := [name for name in names if name not in known]:
        raise TranspileError(
            f"the program has the table {unknown[0]}, but no model that reads it; give the program the "
            "source of a program that was captured with the model: program.source = captured.source"
        )
    return tuple(_plan(number, known[name]) for number, name in enumerate(names))


def served(plans: "Sequence[TablePlan]", mode: DistributedMode) -> tuple[TablePlan, ...]:
    """Return the servers' plans of tables; in GEO mode, the servers' rule adds the trainers' changes.

    Raises
    ------
    ConfigurationError
        GEO is requested, and a table has admission or eviction, which need every update.
    """
    if mode is not DistributedMode.GEO:
        return tuple(plans)
    from fleet.tables.geo import server_config  # imported here, so that plans can be read without torch

    return tuple(replace(plan, config=server_config(plan.config), group=None) for plan in plans)


def table_spec(table: CapturedTable) -> TableSpec:
    """Return the specification of a table."""
    config, own = table.config, isinstance(table.config, OwnTable)
    return TableSpec(table.name, config.num_embeddings or -1, config.dimension, own, _describe(table))


def _named(option: object) -> object:
    """Return an option, or a schedule's name in its place, so that its text is equal in all processes."""
    if not callable(option):
        return option
    return f"{option.__module__}.{getattr(option, '__qualname__', type(option).__qualname__)}"


def _describe(table: CapturedTable) -> str:
    """Return the properties of a table that must be equal in every process and in a checkpoint."""
    config = table.config
    if isinstance(config, OwnTable):
        return (
            f"dimension {config.dimension}, {config.num_embeddings} ids, rows of the module's own, stepped "
            f"as {config.optimizer_class.__qualname__} of param group {table.group}"
        )
    rule = type(config.rule).__qualname__
    if table.group is not None:
        stepped = f"{rule} of param group {table.group}"
    else:
        options = ", ".join(f"{name}={_named(value)}" for name, value in sorted(config.options.items()))
        stepped = f"{rule}({options}) of its own"
    rules = "".join(f", {each!r}" for each in (config.admission, *config.eviction) if each is not None)
    ids = "any id" if config.num_embeddings is None else f"{config.num_embeddings} ids"
    return (
        f"dimension {config.dimension} of {config.row_type!r}, {ids}, {stepped}, first values "
        f"{config.first_values!r} with seed {config.seed}{rules}"
    )


def _plan(number: int, table: CapturedTable) -> TablePlan:
    own = table.config
    if not isinstance(own, OwnTable):
        return TablePlan(number, table.config, table.group, warm_start=table.declared.warm_start)
    from fleet.tables import Constant, TableConfig  # imported here, so that plans can be read without torch
    from fleet.tables.rules import rule_of

    rule, options = rule_of(own.name, own.optimizer_class, own.options)
    config = TableConfig(own.name, own.dimension, rule, own.num_embeddings, Constant(), options=options)
    return TablePlan(number, config, table.group, own.placeholder)
