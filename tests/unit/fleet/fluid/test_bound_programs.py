"""Built programs that parameter servers train: tables, learning rates, clipping, and errors by name."""

from typing import Any

import pytest
import torch

import fleet
from fleet import fluid
from fleet.errors import ConfigurationError, TranspileError
from fleet.fluid import initializer
from fleet.fluid.computation import Computation
from fleet.fluid.execution import initialize
from fleet.fluid.module import ProgramModule
from fleet.tables import Constant, Normal, Uniform
from tests.support import fluid_models

pytestmark = pytest.mark.usefixtures("own_programs")


def transpile(*, sync_mode: bool = True, **fields: Any) -> fluid.DistributeTranspiler:
    transpiler = fluid.DistributeTranspiler(fluid.DistributeTranspilerConfig(**fields))
    transpiler.transpile(0, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=2, sync_mode=sync_mode)
    return transpiler


@pytest.mark.parametrize("sync_mode", [True, False], ids=["sync", "half-async"])
@pytest.mark.parametrize("fetches", [True, False], ids=["fetched", "copied"])
@pytest.mark.parametrize(
    "clip", [fluid.clip.GradientClipByNorm(1.0), fluid.clip.GradientClipByGlobalNorm(1.0)], ids=["own", "all"]
)
def test_no_norm_of_rows_on_several_servers(clip: Any, fetches: bool, sync_mode: bool) -> None:
    model = fluid_models.word2vec(ids=20)
    fluid.optimizer.SGD(0.1, grad_clip=clip).minimize(model.loss)
    words = rf"{type(clip.plan).__name__} needs the norm of .*emb.* expected fluid\.clip\.GradientClipByValue"
    with pytest.raises(TranspileError, match=words):
        transpile(sync_mode=sync_mode, remote_prefetch=fetches)


def test_no_rate_of_a_table_that_servers_cannot_compute() -> None:
    model = fluid_models.distribute_ctr(ids=20, hidden=4)
    rate = fluid.layers.create_global_var([1], 0.1, "float32", persistable=True, name="my_rate")
    fluid.optimizer.Adam(rate).minimize(model.loss)
    with pytest.raises(
        ConfigurationError, match=r"SparseFeatFactors .*my_rate; expected a number, a schedule"
    ):
        transpile()


@pytest.mark.parametrize(
    ("sync_mode", "held"), [(True, fleet.ClipGradByNorm(1.0)), (False, None)], ids=["sync", "half-async"]
)
def test_servers_clip_by_norms_only_where_they_average(sync_mode: bool, held: Any) -> None:
    optimizer = fluid.optimizer.SGD(0.1, grad_clip=fluid.clip.GradientClipByNorm(1.0))
    optimizer.minimize(fluid_models.mlp().loss)
    assert transpile(sync_mode=sync_mode).plan.spec.clip == held


def test_a_table_s_rate_counts_its_updates_as_the_schedule_counts_steps() -> None:
    model = fluid_models.distribute_ctr(ids=20, hidden=4)
    fluid.optimizer.Adam(fluid.layers.exponential_decay(0.8, 2, 0.5, staircase=True)).minimize(model.loss)
    program, _ = transpile().get_pserver_programs("10.0.0.1:6174")
    assert program.source is not None
    (table,) = program.source.tables
    rates = [table.config.options_at(update)["lr"] for update in range(1, 6)]
    assert rates == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2])


def test_a_table_s_rate_follows_every_counter_of_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fluid_models.distribute_ctr(ids=20, hidden=4)
    rate = fluid.layers.exponential_decay(0.8, 1, 0.5)
    with fluid.default_main_program()._lr_schedule_guard():
        steps = fluid.layers.autoincreased_step_counter("own", begin=10, step=5)
        rate = rate * fluid.layers.cast(steps, "float32")
    fluid.optimizer.Adam(rate).minimize(model.loss)
    program, _ = transpile().get_pserver_programs("10.0.0.1:6174")
    assert program.source is not None
    (table,) = program.source.tables
    computed: list[Any] = []
    run = Computation.run

    def counted(*given: Any) -> Any:
        computed.append(given)
        return run(*given)

    monkeypatch.setattr(Computation, "run", counted)
    rates = [table.config.options_at(update)["lr"] for update in (1, 1, 2, 2, 3, 3)]
    assert rates == pytest.approx([11.2, 11.2, 7.6, 7.6, 4.8, 4.8])
    assert len(computed) == 3


def test_no_lazy_rows_where_gradients_of_whole_tables_are_averaged() -> None:
    fluid.optimizer.Adam(0.1, lazy_mode=True).minimize(fluid_models.word2vec(ids=20).loss)
    transpiler = fluid.DistributeTranspiler(fluid.DistributeTranspilerConfig(mode="nccl2"))
    with pytest.raises(TranspileError, match=r"lazy_mode=True, .* expected lazy_mode=False"):
        transpiler.transpile(0, trainers="10.0.0.1:6170,10.0.0.2:6170", current_endpoint="10.0.0.1:6170")


@pytest.mark.parametrize(
    ("dtype", "first", "increment"), [("float32", 0.5, 0.25), ("int64", 2, 3)], ids=["float", "whole"]
)
def test_a_trainer_that_joins_sets_a_counter_to_its_value_at_that_step(
    dtype: str, first: float, increment: float
) -> None:
    counter = fluid.layers.create_global_var([1], first, dtype, persistable=True)
    fluid.layers.increment(counter, increment)
    fluid.optimizer.SGD(0.1).minimize(fluid_models.fit_a_line().loss)
    source = transpile().get_trainer_program().source
    assert source is not None
    assert isinstance(source.module, ProgramModule)
    initialize(source, "cpu")
    for more, step in ((0, 0), (3, 3), (2, 5)):
        source.module.count_on(more)
        assert fluid.global_scope().values[counter.name].tolist() == [first + step * increment]


def table_of(start: initializer.Initializer, ids: int) -> Any:
    """Return the table of a server that has run the startup program."""
    words = fluid.layers.data("words", [1], dtype="int64")
    attr = fluid.ParamAttr(name="table", initializer=start)
    rows = fluid.layers.embedding(words, [ids, 2], is_sparse=True, param_attr=attr)
    fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(rows))
    program, _ = transpile().get_pserver_programs("10.0.0.1:6174")
    assert program.source is not None
    initialize(program.source, "cpu", tables=True)
    return program.source.tables[0].declared


@pytest.mark.parametrize(
    ("start", "first"),
    [
        (initializer.Constant(0.5), Constant(0.5)),
        (initializer.Uniform(-0.5, 0.25), Uniform(-0.5, 0.25)),
        (initializer.Normal(0.25, 0.5), Normal(0.25, 0.5)),
    ],
    ids=["constant", "uniform", "normal"],
)
def test_a_row_takes_no_memory_before_its_first_update(start: initializer.Initializer, first: Any) -> None:
    table = table_of(start, 10**12)
    assert table.first_values == first
    ids, rows = table.warm_start()
    assert (len(ids), tuple(rows.shape)) == (0, (0, 2))


def test_the_rows_of_a_seed_are_those_of_one_process() -> None:
    fluid.default_startup_program().random_seed = fluid.default_main_program().random_seed = 3
    start = initializer.Uniform(-0.5, 0.5)
    ids, rows = table_of(start, 9).warm_start()
    generator = torch.Generator().manual_seed(3)
    assert ids.tolist() == list(range(9))
    assert torch.equal(rows, torch.empty(9, 2).uniform_(-0.5, 0.5, generator=generator))
