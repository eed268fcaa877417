"""Tables on parameter servers, with real sockets: what a job comes to, and what one process comes to."""

from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.checkpoint import TrainStatus
from fleet.errors import CheckpointError, ConfigurationError, FleetError, TranspileError
from fleet.parameter_server.modes import Async
from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from fleet.plan import DistributeTranspilerConfig
from fleet.process import progress
from fleet.tables import Constant, CountFilter, rules
from fleet.wire import Kind
from tests.support.clicks import (
    ADAGRAD,
    ADAM,
    DIM,
    ROWS,
    SGD,
    Clicks,
    alone,
    batch,
    loss_of,
    on_servers,
    one_step,
)
from tests.support.joined import joined
from tests.support.parameter_server import QUICK, Loopback, loopback
from tests.support.processes import wait_for
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import never_minimized

STEPS = 5


def train(
    optimizer: Any,
    servers: int,
    steps: range = range(STEPS),
    save: Path | None = None,
    model: Any = on_servers,
    **arguments: Any,
) -> tuple[Any, Any]:
    """Train with two trainers; return the losses of each, and all rows and the layer's weight."""
    losses: list[list[float]] = [[], []]
    with joined(2, servers=servers, model=model, optimizer=optimizer, **arguments) as made:

        def run(index: int) -> None:
            trainer, model, wrapped = made[index]
            assert trainer.current_step == steps.start
            for step in steps:
                wrapped.zero_grad()
                loss = loss_of(model, step, index)
                loss.backward()
                wrapped.step()
                losses[index].append(loss.item())

        at_once(*(lambda index=index: run(index) for index in range(2)))
        if save is not None:
            made[0][0].save(str(save), TrainStatus())
        with torch.no_grad():
            rows = made[0][1].embedding(torch.arange(ROWS))
        return losses, (rows, made[0][1].head.weight.detach().clone())


def train_alone(optimizers: Any, trainers: int = 2) -> tuple[Any, Any]:
    """Train by one model: gradients of each part of the batch, added, and divided by their number."""
    model = alone()
    made = optimizers(model)
    losses: list[list[float]] = [[] for _ in range(trainers)]
    for step in range(STEPS):
        total: dict[str, torch.Tensor] = {}
        for trainer in range(trainers):
            model.zero_grad()
            loss = loss_of(model, step, trainer)
            loss.backward()
            losses[trainer].append(loss.item())
            for name, parameter in model.named_parameters():
                grad = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
                total[name] = total[name] + grad if name in total else grad
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] * (1.0 / trainers) if trainers > 1 else total[name]
        for optimizer in made:
            optimizer.step()
    return losses, (model.embedding.weight.detach(), model.head.weight.detach())


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("optimizers", "atol"), [(SGD, 0.0), (ADAM, 1e-6), (ADAGRAD, 1e-6)], ids=["sgd", "adam", "adagrad"]
)
def test_a_table_on_any_number_of_servers_is_that_of_one_process(optimizers, atol, servers):
    with one_torch_thread():
        losses, (rows, head) = train(optimizers[0], servers)
        expected, (rows_alone, head_alone) = train_alone(optimizers[1])
    torch.testing.assert_close(rows, rows_alone, rtol=0, atol=atol)
    torch.testing.assert_close(head, head_alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_rows_of_several_servers_are_float32_whatever_the_default_dtype_is():
    with joined(1, servers=2, model=on_servers, optimizer=SGD[0]) as made:
        torch.set_default_dtype(torch.float64)
        try:
            rows = made[0][1].embedding(torch.arange(ROWS))
        finally:
            torch.set_default_dtype(torch.float32)
    assert rows.dtype is torch.float32


@pytest.mark.parametrize("servers", [1, 3])
def test_a_checkpoint_goes_on_with_another_number_of_servers_to_the_bit(servers, tmp_path):
    _, (rows, head) = train(ADAM[0], 2)
    train(ADAM[0], 2, range(3), save=tmp_path)
    _, (rows_later, head_later) = train(ADAM[0], servers, range(3, STEPS), directory=tmp_path)
    assert torch.equal(rows_later, rows)
    assert torch.equal(head_later, head)


def test_a_checkpoint_from_before_the_first_row_is_gone_on_with(tmp_path):
    train(ADAM[0], 2, range(0), save=tmp_path)
    _, (rows, _) = train(ADAM[0], 1, range(1), directory=tmp_path)
    _, (expected, _) = train(ADAM[0], 1, range(1))
    assert torch.equal(rows, expected)


def test_a_checkpoint_whose_rows_are_damaged_is_refused_with_the_file(tmp_path):
    train(SGD[0], 2, range(1), save=tmp_path)
    (damaged, *_) = sorted(tmp_path.glob("*-table-0-*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{damaged.name} has the SHA-256"):
        train(SGD[0], 2, range(1, 2), directory=tmp_path)


def test_a_table_of_another_dimension_is_not_loaded(tmp_path):
    train(SGD[0], 1, range(1), save=tmp_path)

    def other() -> Any:
        return Clicks(fleet.nn.DistributedEmbedding(ROWS, DIM, name="clicks", seed=4))

    with pytest.raises(CheckpointError, match=r"table clicks: dimension 4 .*seed 4.* here"):
        train(SGD[0], 1, range(1, 2), model=other, directory=tmp_path)


def test_any_number_of_servers_comes_to_the_same_bits():
    (one, head), (two, head_of_two) = train(ADAM[0], 1)[1], train(ADAM[0], 2)[1]
    assert torch.equal(one, two)
    assert torch.equal(head, head_of_two)


def test_an_async_trainer_alone_trains_as_one_process():
    config = DistributeTranspilerConfig(sync_mode=False, runtime_split_send_recv=True)
    with joined(1, model=on_servers, optimizer=SGD[0], config=config) as ((_, model, wrapped),):
        losses = []
        for step in range(STEPS):
            wrapped.zero_grad()
            loss = loss_of(model, step, 0)
            loss.backward()
            wrapped.step()
            losses.append(loss.item())
    assert losses == pytest.approx(train_alone(SGD[1], 1)[0][0], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {
                "config": DistributeTranspilerConfig(
                    sync_mode=False, runtime_split_send_recv=True, enable_dc_asgd=True
                )
            },
            "enable_dc_asgd does not support tables",
        ),
        ({"grad_clip": fleet.ClipGradByGlobalNorm(1.0)}, "strategy.grad_clip does not support tables"),
        ({"mode": Async()}, "the mode 'async' does not support tables"),
    ],
    ids=["dc-asgd", "clipping", "a-mode-of-ones-own"],
)
def test_what_tables_are_not_trained_with_is_refused_by_name(options, words):
    with pytest.raises(TranspileError, match=words):
        Loopback(optimizer=SGD[0], model=on_servers, **options).transpile()


def test_where_sparse_gradients_are_refused_the_way_out_is_named():
    with pytest.raises(
        TranspileError, match=r"has embedding\.weight .* torch\.nn\.Embedding .* sparse=False"
    ):
        Loopback(optimizer=SGD[0], model=held_by_trainers, mode=Async()).transpile()


def table_of(dimension: int = DIM, **options: Any) -> Any:
    """Return the model with the table of the same name, and its layer, whatever the table's dimension."""
    model = on_servers()
    table = fleet.nn.DistributedTable("clicks", dimension, ROWS, seed=3, **options)
    model.embedding = fleet.nn.DistributedEmbedding(ROWS, dimension, table=table)
    return model


def falling(update: int) -> float:
    return 1.0 / update


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"first_values": Constant()}, r"dimension 4 .*Normal.* here, .*Constant"),
        ({"dimension": 8}, r"dimension 4 .* here, .*dimension 8 "),
        ({"rule": rules.Adagrad()}, r"SGD of param group 0.* here, .*Adagrad\(\) of its own"),
        (
            {"rule": rules.SGD(), "options": {"lr": 0.1}},
            r"SGD of param group 0.* here, .*SGD\(lr=0.1\) of its own",
        ),
        (
            {"rule": rules.SGD(), "options": {"lr": falling}},
            r"SGD of param group 0.* here, .*SGD\(lr=\S+\.falling\) of its own",
        ),
        ({"admission": CountFilter(2)}, r" here, .*CountFilter\(count=2\)"),
    ],
    ids=["first-values", "dimension", "rule", "rule-of-its-own", "schedule", "admission"],
)
def test_a_trainer_with_another_table_is_refused_when_it_joins(other, words):
    with loopback(optimizer=SGD[0], model=on_servers) as job:
        trainer = job.make_trainer(model=lambda: table_of(**other))[0]
        with pytest.raises(ConfigurationError, match=f"table clicks: .*{words}"):
            trainer.start()


@pytest.mark.parametrize(
    ("action", "words"),
    [("stop", "the gradient of row 7 of table clicks holds NaN"), ("skip", "")],
)
def test_a_row_gradient_that_is_no_number_is_refused_with_its_row_or_left_out(action, words, caplog):
    with joined(1, {"non_finite": action}, model=on_servers, optimizer=SGD[0]) as ((_, model, wrapped),):
        ids = torch.tensor([[3, 7]])
        before = model.embedding(ids).detach()
        (model.embedding(ids).flatten(1)[0, DIM:] * float("nan")).sum().backward()
        if words:
            with pytest.raises(FleetError, match=words):
                wrapped.step()
            return
        skipped = progress.snapshot()["counters"].get("steps_skipped", 0)
        wrapped.step()
        assert torch.equal(model.embedding(ids), before)
        assert "row 7 of table clicks" in caplog.text
        assert progress.snapshot()["counters"]["steps_skipped"] == skipped + 1


def test_a_schedule_of_the_learning_rate_holds_for_rows():
    with joined(1, model=on_servers, optimizer=SGD[0]) as ((_, model, wrapped),):
        ids = torch.tensor([[3, 7]])
        for rate in (0.5, 0.25):
            wrapped.param_groups[0]["lr"] = rate
            before = model.embedding(ids).detach()
            model.embedding(ids).sum().backward()
            wrapped.step()
            assert torch.equal(model.embedding(ids), before - rate)


@pytest.mark.parametrize(
    "config",
    [None, DistributeTranspilerConfig(sync_mode=False, geo_sgd_mode=True)],
    ids=["sync", "geo"],
)
def test_a_table_with_a_rule_of_its_own_may_have_a_schedule(config):
    def model() -> Any:
        return table_of(rule=rules.SGD(), options={"lr": falling})

    with joined(1, model=model, optimizer=SGD[0], config=config) as ((_, net, wrapped),):
        for update, touched in enumerate(([3, 7], [3, 7], [5], [3, 7]), start=1):
            ids = torch.tensor(touched)
            before = net.embedding(ids).detach()
            net.embedding(ids).sum().backward()
            wrapped.step()
            wrapped.zero_grad()
            torch.testing.assert_close(net.embedding(ids).detach(), before - 1.0 / update)


def test_gradients_of_several_passes_and_look_ups_are_one():
    with joined(1, model=on_servers, optimizer=SGD[0]) as ((_, model, wrapped),):
        ids = torch.tensor([3])
        before = model.embedding(ids).detach()
        model.embedding(ids).sum().backward()
        wrapped.zero_grad()  # drops it
        with wrapped.no_sync():
            (model.embedding(ids) + model.embedding(torch.tensor([3, 4]))[:1]).sum().backward()
        model.embedding(ids).sum().backward()
        wrapped.step()
        assert torch.equal(model.embedding(ids), before - 0.5 * 3)


def test_the_programs_show_what_tables_do():
    transpiler, _ = Loopback(optimizer=SGD[0], model=on_servers).transpile()
    trainer = [op.type for op in transpiler.get_trainer_program().global_block().ops]
    assert trainer[:3] == ["split_ids", "prefetch", "distributed_lookup_table"]
    at = trainer.index("lookup_table_grad")
    assert trainer[at : at + 3] == ["lookup_table_grad", "split_selected_rows", "send"]
    server = transpiler.get_pserver_program(transpiler.get_trainer_program().attr("endpoints")[0])
    (listen,) = server.global_block().ops
    assert listen.attr("sparse_grad_to_param") == ["clicks@GRAD:clicks"]
    assert server.blocks[-1].ops[0].type == "lookup_sparse_table"


def has_stepped(server: Any, steps: int) -> bool:
    return bool(all(each.step == steps for each in server._mode._tables.rounds.values()))


@pytest.mark.parametrize("servers_reached", [0, 1, 2])
def test_a_trainer_that_ends_amid_a_step_comes_back_to_its_rows_and_changes_no_bit(servers_reached):
    _, (expected, _) = train(ADAM[0], 2)
    with one_torch_thread(), loopback(servers=2, trainers=2, model=on_servers, optimizer=ADAM[0]) as job:

        def make(index: int, attempt: int) -> tuple[Any, Any, Any]:
            trainer, model, wrapped = job.make_trainer(index, attempt=attempt)
            optimizer = DistributedOptimizer(wrapped, never_minimized)
            optimizer.bind(trainer)
            return trainer, model, optimizer

        stays, victim = make(0, 0), make(1, 0)
        at_once(stays[0].start, victim[0].start)
        for step in range(2):
            at_once(partial(one_step, stays, step, 0), partial(one_step, victim, step, 1))
        rows = victim[0].session.rows
        send, streams = rows.send, rows._streams

        def some(gradients: Any) -> None:
            rows._streams = streams[:servers_reached]
            send(gradients)
            raise KeyboardInterrupt

        rows.send = some
        with futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(one_step, stays, 2, 0)
            with pytest.raises(KeyboardInterrupt):
                one_step(victim, 2, 1)
            victim[0].flow.detach()
            for connection in victim[0].session.connections:
                assert connection.stream.wait_until_taken(connection.stream.send(Kind.CONFIRM), 10.0)
            for running in job.servers[:servers_reached]:
                wait_for(partial(has_stepped, running.server, 3), "a server to step its rows")
            victim[0].close()
            back = make(1, 1)
            back[0].start()
            assert back[0].current_step == (3 if servers_reached == 2 else 2)
            if servers_reached < 2:
                one_step(back, 2, 1)
            waits.result(30)
        for step in range(3, STEPS):
            at_once(partial(one_step, stays, step, 0), partial(one_step, back, step, 1))
        with torch.no_grad():
            assert torch.equal(stays[1].embedding(torch.arange(ROWS)), expected)


def held_by_trainers() -> Any:
    """Return the model whose table has sparse gradients, and lies on the trainers too."""
    return alone()


def test_sparse_gradients_of_a_table_that_trainers_hold_travel_as_rows(tmp_path):
    weights: list[torch.Tensor] = []
    _, (rows_alone, head_alone) = train_alone(ADAM[1])
    for servers, steps, save in ((2, range(3), tmp_path), (1, range(3, STEPS), None)):
        directory = tmp_path if steps.start else None
        with joined(
            2, servers=servers, model=held_by_trainers, optimizer=ADAM[0], directory=directory
        ) as made:
            for step in steps:
                at_once(*(partial(one_step, made[index], step, index) for index in range(2)))
            if save is not None:
                made[0][0].save(str(save), TrainStatus())
            weights = [model.embedding.weight.detach().clone() for _, model, _ in made]
            exported = made[0][0].export()
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(exported["embedding.weight"], weights[0])
    torch.testing.assert_close(weights[0], rows_alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(exported["head.weight"], head_alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", [held_by_trainers, on_servers], ids=["held", "on-servers"])
def test_ids_that_come_several_times_are_summed_first_and_within_what_the_docs_say_of_torchs_sgd(model):
    times, steps, lr, unit = 7, 6, 0.1, 2.0**-24
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(ROWS).repeat(times)[torch.randperm(ROWS * times, generator=generator)]
    weights = torch.randn(
        steps, ROWS * times, DIM, generator=generator
    )  # the gradients, as losses are linear
    with joined(1, model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr)) as made:
        ((_, trained, wrapped),) = made
        coalesced, plain = alone().embedding, alone().embedding
        bound = torch.zeros(ROWS, DIM)
        for step in range(steps):
            wrapped.zero_grad()
            (trained.embedding(ids) * weights[step]).sum().backward()
            wrapped.step()
            for each in (coalesced, plain):
                each.weight.grad = None
                (each(ids) * weights[step]).sum().backward()
                assert not each.weight.grad.is_coalesced()
            coalesced.weight.grad = coalesced.weight.grad.coalesce()
            sizes = torch.zeros(ROWS, DIM).index_add_(0, ids, weights[step].abs())
            bound += (times + 1) * unit * (plain.weight.detach().abs() + 2 * lr * sizes)
            for each in (coalesced, plain):
                torch.optim.SGD(each.parameters(), lr=lr).step()
        with torch.no_grad():
            rows = trained.embedding(torch.arange(ROWS))
    if model is held_by_trainers:
        assert torch.equal(rows, coalesced.weight)
    difference = (rows - plain.weight).abs()
    assert difference.any(), "otherwise the docs may say more"
    assert bool((difference <= bound).all())


def test_an_async_trainer_is_told_of_rows_that_another_one_has_changed():
    config = DistributeTranspilerConfig(sync_mode=False, runtime_split_send_recv=True)
    with joined(2, model=held_by_trainers, optimizer=SGD[0], config=config) as made:
        first, second = (model.embedding.weight for _, model, _ in made)
        before = first.detach().clone()
        for (_, model, wrapped), row in zip(made, (3, 7), strict=True):
            model.embedding(torch.tensor([row])).sum().backward()
            wrapped.step()
        assert torch.equal(second[[3, 7]], before[[3, 7]] - 0.5)
        assert torch.equal(first[[3, 7]], torch.stack([before[3] - 0.5, before[7]]))


def test_a_bag_with_sparse_gradients_is_trained_by_rows():
    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum"))

    with joined(1, model=model, optimizer=SGD[0]) as ((_, bag, wrapped),):
        before = bag[0].weight.detach().clone()
        bag(torch.tensor([[3, 7, 3]])).sum().backward()
        wrapped.step()
        before[3] -= 1.0
        before[7] -= 0.5
        assert torch.equal(bag[0].weight, before)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_connection_that_breaks_amid_look_ups_and_steps_changes_no_bit(transport, caplog):
    _, (expected, _) = train(ADAM[0], 2)
    settings = replace(QUICK, transport=transport)
    with joined(2, model=on_servers, optimizer=ADAM[0], settings=settings) as made:
        made[0][1].register_forward_pre_hook(lambda *_: break_connections(made))
        for step in range(STEPS):
            at_once(*(partial(one_step, made[index], step, index) for index in range(2)))
        with torch.no_grad():
            assert torch.equal(made[0][1].embedding(torch.arange(ROWS)), expected)
    assert caplog.text.count("is back; ") >= STEPS


def break_connections(made: Any) -> None:
    """End one connection of each trainer, as a network would."""
    for trainer, _, _ in made:
        trainer.session.connections[trainer.current_step % 2].stream.hang_up()


def test_values_that_are_awaited_in_the_next_forward_pass_come_to_the_same_bits():
    _, (expected, _) = train(ADAM[0], 2)
    _, (rows, _) = train(ADAM[0], 2, of_trainer={"cross_step": True})
    assert torch.equal(rows, expected)


def test_a_model_that_is_nothing_but_a_table_trains():
    def model() -> Any:
        return torch.nn.Sequential(fleet.nn.DistributedEmbedding(ROWS, DIM, name="only", first_values=0.0))

    with joined(1, model=model, optimizer=SGD[0]) as ((trainer, table, wrapped),):
        for _ in range(3):
            table(torch.tensor([3, 7, 3])).sum().backward()
            wrapped.step()
        assert table(torch.tensor([3, 4, 7]))[:, 0].tolist() == [-3.0, 0.0, -1.5]
        trainer.complete()


def test_rows_travel_as_they_are_where_dense_values_travel_as_bfloat16():
    settings = replace(QUICK, transport="tcp", wire_dtype="bfloat16")
    with joined(1, model=on_servers, optimizer=SGD[0], settings=settings) as ((_, model, wrapped),):
        ids = torch.tensor([3, 7])
        before = model.embedding(ids).detach()
        (model.embedding(ids) * (1 / 3)).sum().backward()
        wrapped.step()
        assert torch.equal(model.embedding(ids), before - 0.5 * torch.tensor(1 / 3))


def test_rows_are_counted_where_they_pass():
    def counted() -> list[float]:
        counters = progress.snapshot()["counters"]
        names = ("rows_looked_up", "row_gradients_sent", "rows_stepped")
        return [counters.get(name, 0) for name in names]

    with joined(1, model=on_servers, optimizer=SGD[0]) as ((_, model, wrapped),):
        before = counted()
        with torch.no_grad():
            model.embedding(torch.tensor([8]))
        model.embedding(torch.tensor([3, 7, 3])).sum().backward()
        wrapped.step()
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [3, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")
@pytest.mark.parametrize("held", [False, True], ids=["on-servers", "held-by-trainers"])
def test_a_model_on_a_gpu_reads_and_trains_the_rows_that_one_on_the_host_does(held, monkeypatch):
    rows, pinned, pin = [], list[torch.Tensor](), torch.Tensor.pin_memory

    def noted(each: torch.Tensor) -> torch.Tensor:
        pinned.append(each)
        return pin(each)

    monkeypatch.setattr(torch.Tensor, "pin_memory", noted)
    for device in ("cpu", "cuda"):

        def model(device: str = device) -> Any:
            return (held_by_trainers() if held else on_servers()).to(device)

        with joined(1, model=model, optimizer=SGD[0]) as ((_, made, wrapped),):
            for step in range(STEPS):
                wrapped.zero_grad()
                ids = batch(step, 0)[0].to(device)
                (made.embedding(ids) * 0.25).sum().backward()  # what both add up to the same bits
                wrapped.step()
            with torch.no_grad():
                rows.append(made.embedding(torch.arange(ROWS, device=device)).cpu())
        assert bool(pinned) == (device == "cuda")
    assert torch.equal(*rows)
