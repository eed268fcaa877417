"""Tables that live on the parameter servers, as a captured program shows them.

A model reads them through modules of `fleet.nn`, which have ``is_distributed = True`` and say in
`distributed_tables` which. An optimizer's param group holds a placeholder of each, a parameter without
elements.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from fleet.errors import TranspileError
from fleet.program.ir import Attribute, Block, CapturedTable, OpRole, OwnTable, Variable
from fleet.program.optimizers import read_hyper_parameters

if TYPE_CHECKING:
    import torch

__all__ = ["LOOK_UP_TYPE", "append_look_ups", "append_row_gradients", "find_tables", "placeholders_of"]

LOOK_UP_TYPE: Final = "lookup_table"
_GRADIENT_TYPE: Final = "lookup_table_grad"


def find_tables(
    optimizer: "torch.optim.Optimizer", model: "torch.nn.Module | None", *, served: bool = True
) -> tuple[CapturedTable, ...]:
    """Return the tables of a model, by name, each with what the optimizer says of it.

    Where it is not `served`, an embedding with sparse gradients is a parameter as any other.

    Raises
    ------
    TranspileError
        Two tables have one name; or the optimizer holds a table of no known model.
    ConfigurationError
        Nobody says how a table is stepped; see `fleet.nn.DistributedTable.config`.
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
                f"two tables are named {table.name!r}; each needs a name of its own, or hand one on to share "
                "it: DistributedEmbedding(…, table=other.table)"
            )
        index = groups.get(id(table.placeholder)) if table.rule is None else None
        options = None if index is None else read_hyper_parameters(optimizer, optimizer.param_groups[index])
        config = table.config(type(optimizer), options)
        found[table.name] = CapturedTable(table.name, table, config, index)
    _refuse_unknown(optimizer, placeholders_of(found.values()))
    return tuple(found[name] for name in sorted(found))


def placeholders_of(tables: Iterable[CapturedTable]) -> frozenset[int]:
    """Return the identities of the parameters that stand for tables."""
    return frozenset(id(table.declared.placeholder) for table in tables)


def append_look_ups(block: Block, tables: Iterable[CapturedTable]) -> None:
    """Append the operators that read rows, before the model's own."""
    for table in tables:
        if block.has_var(table.name):
            raise TranspileError(f"a table and a parameter or an input are named {table.name!r}; rename one")
        rows, grad, config = f"{table.name}@ROWS", f"{table.name}@GRAD", table.config
        shape = (config.num_embeddings or -1, config.dimension)
        for name in (table.name, rows, grad):
            block.create_var(Variable(name, shape))
        attrs: Mapping[str, Attribute] = {
            "is_sparse": True,
            "is_distributed": not isinstance(config, OwnTable),
            "table": _describe(table),
            "op_role": int(OpRole.FORWARD),
        }
        block.append_op(LOOK_UP_TYPE, {"W": [table.name]}, {"Out": [rows]}, attrs)


def append_row_gradients(block: Block, tables: Iterable[CapturedTable], loss_grad: str) -> None:
    """Append the operators that give the rows that were read their gradients."""
    for table in tables:
        grad = f"{table.name}@GRAD"
        attrs: Mapping[str, Attribute] = {
            "is_distributed": not isinstance(table.config, OwnTable),
            "table": table.name,
            "op_role": int(OpRole.BACKWARD),
            "op_role_var": [table.name, grad],
        }
        block.append_op(_GRADIENT_TYPE, {"X": [loss_grad]}, {"W@GRAD": [grad]}, attrs)


def _named(option: object) -> object:
    """Return an option, of a schedule what it is called: where it lies in memory is each process's own."""
    if not callable(option):
        return option
    return f"{option.__module__}.{getattr(option, '__qualname__', type(option).__qualname__)}"


def _describe(table: CapturedTable) -> str:
    """Say what a table is: what must be equal in every process, and in a checkpoint."""
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


def _own_tables(
    optimizer: "torch.optim.Optimizer", model: "torch.nn.Module | None", groups: Mapping[int, int]
) -> dict[str, CapturedTable]:
    """Return the weights of modules with sparse gradients that the optimizer steps."""
    import torch  # not above: programs are read and printed where no torch is loaded

    names = {id(weight): name for name, weight in model.named_parameters()} if model is not None else {}
    found: dict[str, CapturedTable] = {}
    for module in model.modules() if model is not None else ():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) or not module.sparse:
            continue
        weight, index = module.weight, groups.get(id(module.weight))
        if index is None or not isinstance(weight, torch.nn.Parameter) or not weight.requires_grad:
            continue
        name = names[id(weight)]
        if weight.dtype is not torch.float32:
            raise TranspileError(
                f"{name} has sparse gradients of {weight.dtype}; rows are stepped in torch.float32: use "
                "that, or sparse=False"
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
                    f"parameter {position} of the optimizer's param group {index} stands for the table "
                    f"{table}, and no module is known that reads it; give the model: "
                    "fleet.distributed_optimizer(optimizer, strategy, model=model)"
                )
