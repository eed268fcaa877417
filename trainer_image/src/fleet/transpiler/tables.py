"""The tables of a job as a plan has them, read from the objects behind a program."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from fleet.errors import TranspileError
from fleet.program.ir import CapturedTable, OwnTable
from fleet.program.program import Program
from fleet.transpiler.config import DistributedMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Parameter

    from fleet.tables import TableConfig
    from fleet.wire import HyperParameters

__all__ = ["TablePlan", "lower_tables", "served", "shards_on"]


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One table: every server holds some of its shards."""

    number: int
    """The same on every trainer and server: its position among the tables, by name."""
    config: "TableConfig"
    group: int | None
    """Index of the optimizer's param group whose options each step brings; None where it has its own."""
    own: "Parameter | None" = None
    """The module's weight, where trainers hold the table too: each is told of the rows that have changed."""
    warm_start: "Callable[[], tuple[Any, Any]] | None" = None
    """Returns ids and vectors with which the table begins, on servers."""

    @property
    def name(self) -> str:
        """The table's name."""
        return self.config.name

    @property
    def row_bytes(self) -> int:
        """The bytes of a row as it travels: float32, however it is stored."""
        return 4 * self.config.dimension

    def options(self, hyper_parameters: "HyperParameters") -> "Mapping[str, Any]":
        """Return the options of a step: those of the table's param group, unless it has a rule of its own."""
        from fleet.tables.rules import options_of  # here: programs are made and read without torch

        return {} if self.group is None else options_of(self.config.rule, hyper_parameters[self.group])


def shards_on(server: int, num_servers: int) -> tuple[int, ...]:
    """Return the virtual shards of every table that one of so many servers holds."""
    from fleet.tables import Placement  # as above

    return Placement.over(num_servers).shards_of(server)


def lower_tables(program: Program) -> tuple[TablePlan, ...]:
    """Return the tables of a transpiled program.

    Raises
    ------
    TranspileError
        The program was read from a text, and so has no tables behind it.
    """
    names = cast("Sequence[str]", program.attrs.get("tables", ()))
    known = {each.name: each for each in program.source.tables} if program.source is not None else {}
    if unknown := [name for name in names if name not in known]:
        raise TranspileError(
            f"the program has the table {unknown[0]}, and no model behind it that reads it; give the program "
            "the source of one that was captured with it: program.source = captured.source"
        )
    return tuple(_plan(number, known[name]) for number, name in enumerate(names))


def served(plans: "Sequence[TablePlan]", mode: DistributedMode) -> tuple[TablePlan, ...]:
    """Return tables as servers have them: in GEO they add what trainers have changed.

    Raises
    ------
    ConfigurationError
        A table's rules need to see each gradient.
    """
    if mode is not DistributedMode.GEO:
        return tuple(plans)
    from fleet.tables.geo import server_config  # as above

    return tuple(replace(plan, config=server_config(plan.config), group=None) for plan in plans)


def _plan(number: int, table: CapturedTable) -> TablePlan:
    own = table.config
    if not isinstance(own, OwnTable):
        return TablePlan(number, table.config, table.group, warm_start=table.declared.warm_start)
    from fleet.tables import Constant, TableConfig  # as above
    from fleet.tables.rules import rule_of

    rule, options = rule_of(own.name, own.optimizer_class, own.options)
    config = TableConfig(own.name, own.dimension, rule, own.num_embeddings, Constant(), options=options)
    return TablePlan(number, config, table.group, own.placeholder)
