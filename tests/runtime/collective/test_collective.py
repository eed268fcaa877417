"""Collective training by real processes: the mathematics, and what happens when trainers fail."""

import json
import os
import signal
import textwrap
import time

import pytest
import torch

from fleet.checkpoint import Checkpoint
from fleet.collective import Fleet
from fleet.errors import ConfigurationError
from fleet.process import lifecycle
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.support.parameter_server import loopback
from tests.support.processes import alive, wait_for

PS_ROLE = UserDefinedRoleMaker(
    current_id=0, role=Role.WORKER, worker_num=1, server_endpoints=["127.0.0.1:6174"]
)

TOGETHER = """
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
rank, size = fleet.worker_index(), fleet.worker_num()
model = build(seed=rank)  # the seeds differ: trainer 0's values win
model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
model.register_parameter("sometimes", torch.nn.Parameter(torch.ones(3)))
model.register_parameter("once", torch.nn.Parameter(torch.ones(5)))
optimizer = fleet.distributed_optimizer(
    torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1), model=model
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
fleet.init_worker()
for step in range(6):
    optimizer.zero_grad()
    if step == 3:  # two backward passes, one exchange
        with optimizer.no_sync():
            (loss_of(model, step, rank) / 2).backward()
        (loss_of(model, step + 100, rank) / 2).backward()
    else:
        loss = loss_of(model, step, rank)
        if rank == 1:
            loss = loss + (model.sometimes ** 2).sum()
        if step == 0:  # its gradient comes first, and then never again
            loss = loss + (model.once ** 2).sum()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
assert model.unused.grad is None
sums = fleet.all_reduce_worker([float(rank), 1.0])
assert sums.tolist() == [1.0, 2.0]
assert fleet.split_files(["a", "b", "c"]) == (["a", "b"] if rank == 0 else ["c"])
torch.save(model.state_dict(), f"model-{rank}.pt")
fleet.stop_worker()
"""

ALONE = """
model = build(seed=0)
model.register_parameter("sometimes", torch.nn.Parameter(torch.ones(3)))
model.register_parameter("once", torch.nn.Parameter(torch.ones(5)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
for step in range(6):
    optimizer.zero_grad()
    shards = []
    for other in range(size):
        if step == 3:
            loss = (loss_of(model, step, other) + loss_of(model, step + 100, other)) / 2
        else:
            loss = loss_of(model, step, other)
            if other == 1:
                loss = loss + (model.sometimes ** 2).sum()
            if step == 0:
                loss = loss + (model.once ** 2).sum()
        shards.append(loss / size)
    sum(shards).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
for name, value in torch.load(f"model-{rank}.pt").items():
    if name != "unused":
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
"""


def test_training_is_that_of_one_process_with_all_shards(trainers, tmp_path):
    life = {"FLEET_CHECKPOINT_DIR": str(tmp_path), "FLEET_JOB_UID": "uid-1", "FLEET_LIFE": "0"}
    for process in trainers(TOGETHER + ALONE, **life):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    first, second = (torch.load(tmp_path / f"model-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    words = json.loads((tmp_path / "words-1").read_text())
    assert words["counters"]["bytes_reduced"] > 0
    assert (words["joined"], words["completedTrainers"]) == (True, "0-1")  # all were at stop_worker together
    *_, again = trainers("fleet.init()\nraise SystemExit('it trains again')", ranks=(1,), **life)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert "this training run has already finished" in err


ONE_GPU = """
from types import SimpleNamespace
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_properties = lambda number: SimpleNamespace(uuid="GPU-a", name="a GPU")
os.environ["LOCAL_RANK"] = os.environ["RANK"]
"""
"""What stands in for a machine with a GPU, which training on the CPU leaves alone."""


def test_two_processes_train_on_the_cpu_of_a_machine_with_one_gpu(trainers):
    body = """
    fleet.init()
    model = build(0)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 0, fleet.worker_index()).backward()
    optimizer.step()
    fleet.stop_worker()
    """
    for process in trainers(ONE_GPU + textwrap.dedent(body)):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


@pytest.mark.serial
def test_a_killed_trainer_is_named_within_five_seconds_though_it_has_forked(trainers, tmp_path):
    body = """
    fleet.init()
    rank = fleet.worker_index()
    model = build(seed=0)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    child = os.fork() if rank == 1 else -1
    if child == 0:
        pathlib.Path("child").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    for step in range(100_000):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        if step == 3 and rank == 1:
            pathlib.Path("training").touch()
        time.sleep(0.01)
    """
    first, second = trainers(body, FLEET_HEARTBEAT_SECONDS="1")
    wait_for((tmp_path / "training").exists, "the third step", seconds=60)
    child = int(wait_for((tmp_path / "child").exists, "the child") and (tmp_path / "child").read_text())
    second.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    try:
        _, err = first.communicate(timeout=20)
        assert time.monotonic() - killed < 5
        assert alive(child)  # it outlived its parent, and hid nothing
    finally:
        os.kill(child, signal.SIGKILL)
    assert first.returncode == 91
    assert "trainer 0: trainer 1 (127.0.0.1:" in err
    assert "vanished while the average of step" in (tmp_path / "words-0").read_text()


def test_a_trainer_that_never_comes_is_named(trainers, tmp_path):
    (only,) = trainers("fleet.init()", ranks=(0,), FLAGS_rpc_deadline="8000")
    _, err = only.communicate(timeout=60)
    assert only.returncode == 91
    assert "waiting for trainer 1 (127.0.0.1:" in err
    assert "did not join within" in (tmp_path / "words-0").read_text()


def test_a_trainer_without_trainer_0_says_where_it_looked(trainers, tmp_path):
    (only,) = trainers("fleet.init()", ranks=(1,), FLAGS_rpc_deadline="4000")
    only.communicate(timeout=60)
    assert only.returncode == 91
    assert "trainer 0 (127.0.0.1:" in (tmp_path / "words-1").read_text()


def test_models_that_differ_are_the_users_mistake(trainers):
    # Trainer 1 reads late: trainer 0, in whose store it reads, must not have ended by then.
    body = """
    class Slow:
        def __init__(self, store):
            self.store = store
        def __getattr__(self, name):
            return getattr(self.store, name)
        def get(self, key):
            time.sleep(2)
            return self.store.get(key)

    fleet.init()
    if fleet.worker_index() == 1:
        fleet._trainer.group._texts._store = Slow(fleet._trainer.group._texts._store)
    model = torch.nn.Linear(4, 2 + fleet.worker_index())
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    """
    for process in trainers(body):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert "weight (2, 4) torch.float32" in err
        assert "weight (3, 4) torch.float32" in err
        assert "Traceback" not in err


def test_a_trainer_that_comes_late_to_the_optimizer_is_waited_for(trainers):
    # The store's own patience is for trainers that are gone; one that reads its data may take longer.
    body = """
    import datetime
    fleet.init()
    if fleet.worker_index() == 1:
        fleet._trainer.group._texts._store.set_timeout(datetime.timedelta(seconds=0.2))
    else:
        time.sleep(1)
    model = build(seed=0)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    fleet.stop_worker()
    """
    for process in trainers(body):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_every_trainer_begins_with_trainer_0s_values_whatever_their_layout_and_takes_those_it_pushes(
    trainers, tmp_path
):
    body = """
    fleet.init()
    rank = fleet.worker_index()
    torch.manual_seed(rank)
    gaps = torch.nn.Parameter(torch.randn(4, 5)[:, :3])
    turned = torch.nn.Parameter(torch.randn(4, 3).t())
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[0].requires_grad_(False)  # no optimizer has it
    model[1].register_buffer("mask", torch.rand(3) < 0.5)
    model(torch.randn(5, 3))
    fleet.distributed_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model=model)
    everything = [gaps, turned, frozen]
    fleet.distributed_optimizer(torch.optim.SGD(everything, lr=0.1))
    everything += model.state_dict().values()
    begun = [each.detach().clone() for each in everything]
    for each in everything[:3]:
        each.data.fill_(rank + 0.5)
    fleet.push_parameters()
    torch.save([begun, everything], f"values-{rank}.pt")
    fleet.stop_worker()
    """
    for process in trainers(body):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    (first, pushed_first), (second, pushed) = (torch.load(tmp_path / f"values-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all((each == 0.5).all() for each in (*pushed_first[:3], *pushed[:3]))


def test_what_waits_says_so_and_for_whom(trainers):
    body = """
    import logging
    from fleet.collective import watchdog
    logging.basicConfig()
    watchdog.LOG_AFTER_SECONDS = 1.0
    fleet.init()
    if fleet.worker_index() == 1:
        time.sleep(4)
    fleet.barrier_worker()
    fleet.stop_worker()
    """
    first, second = trainers(body, FLEET_HEARTBEAT_SECONDS="0.5")
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert "a barrier has been waiting for" in err
    assert "every trainer is alive, not there yet: trainer 1 (127.0.0.1:" in err
    second.communicate(timeout=60)
    assert second.returncode == 0


@pytest.mark.parametrize("call", ["stop_worker()", "all_reduce_worker(1.0)"])
@pytest.mark.parametrize("width", [8, 1], ids=["gradients-of-any-size", "gradients-as-small-as-a-barrier"])
def test_a_trainer_with_a_batch_fewer_is_named_to_all(trainers, call, width):
    body = f"""
    fleet.init()
    rank = fleet.worker_index()
    weight = torch.nn.Parameter(torch.ones({width}))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=0.1))
    for step in range(3 - rank):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    fleet.{call}
    fleet.stop_worker()
    """
    first, second = trainers(body, FLEET_HEARTBEAT_SECONDS="0.5")
    for process, mine, theirs in ((first, 0, 1), (second, 1, 0)):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert f"trainer {mine}: trainer {theirs} (127.0.0.1:" in err
        assert f"for {call.partition('(')[0]}" in err
        assert "after 2 exchanges of gradients" in err
        assert "for the average of step 2's gradients" in err
        assert "give every trainer the same number of batches" in err
        assert "Traceback" not in err


def test_calls_that_differ_are_named_to_all(trainers):
    body = """
    fleet.init()
    fleet.all_reduce_worker([1, 2][fleet.worker_index():])
    """
    for process, theirs in zip(trainers(body), ("int64[1]", "int64[2]"), strict=True):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert f"has reached all_reduce_worker (the sum of {theirs}) where this trainer" in err
        assert "expected the same calls, in the same order" in err
        assert "Traceback" not in err


def test_numbers_of_every_width_are_combined(trainers):
    body = """
    import numpy as np
    fleet.init()
    rank = fleet.worker_index()
    for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", ">f4", "float64"):
        most = fleet.all_reduce_worker(np.array([rank, 2], kind), mode="max")
        assert (most.dtype, most.tolist()) == (np.dtype(kind), [1, 2]), kind
    assert fleet.all_reduce_worker(np.int16(rank + 1)).item() == 3
    for kind in ("int32", "float64"):
        rows = np.arange(6).reshape(2, 3).astype(kind)
        columns = np.asfortranarray(rows)  # in memory as its transpose, which one trainer alone may have
        assert (fleet.all_reduce_worker(columns if rank else rows) == 2 * rows).all(), kind
    try:
        fleet.all_reduce_worker(np.ones(2, "uint64"))
    except fleet.ConfigurationError as error:
        print(error, file=sys.stderr)
    fleet.stop_worker()
    """
    for process in trainers(body):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "all_reduce_worker got uint64 for the sum; expected integers up to int64" in err


@pytest.mark.parametrize(
    "call", ["stop_worker()", "barrier_worker()", "all_reduce_worker(1)", "init_worker()"]
)
def test_what_comes_after_the_end_is_explained(trainers, call):
    (only,) = trainers(f"fleet.init()\nfleet.stop_worker()\nfleet.{call}", ranks=(0,), size=1)
    _, err = only.communicate(timeout=60)
    assert only.returncode == 2, err
    assert "fleet.stop_worker was called, so this trainer has left the job" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda fleet: fleet.barrier_worker(), "fleet.init was not called; call it before any other"),
        (lambda fleet: fleet.worker_num(), "fleet.init was not called"),
        (lambda fleet: fleet.run_server(), "run_server: a collective job has no servers"),
        (
            lambda fleet: fleet.distributed_optimizer(torch.optim.LBFGS([torch.ones(1)])),
            "LBFGS chooses its step from the loss on a trainer's own data",
        ),
        (
            lambda fleet: fleet.is_server("folder"),
            "model_dir is 'folder', but a collective job has no",
        ),
        (lambda fleet: fleet.init(role_maker=PS_ROLE), "the role of a job with parameter servers; expected"),
    ],
)
def test_misuse_is_explained(misuse, message, monkeypatch):
    monkeypatch.setattr(lifecycle, "start", lambda _: None)
    with pytest.raises(ConfigurationError) as error:
        misuse(Fleet())
    assert message in str(error.value)


@pytest.mark.timeout(240)
def test_a_loop_goes_on_where_a_checkpoint_was_made_in_the_middle_of_an_epoch(trainers):
    body = """
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    rank = fleet.worker_index()
    model = build(seed=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = fleet.distributed_optimizer(sgd, model=model)
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    by_step = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    fleet.init_worker()
    again = fleet.load_check_point("middle").step == 4
    data = torch.arange(18)[rank::2]
    loader = torch.utils.data.DataLoader(data, 3, shuffle=True)
    seen = []
    for epoch, batches in fleet.epochs(3, loader, by_epoch, step_scheduler=by_step):
        for numbers in batches:
            if fleet.step == 4 and not again:
                fleet.save_check_point("middle", fleet.TrainStatus())
            seen.append((fleet.step, epoch, numbers.tolist(), optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            loss_of(model, int(numbers.sum()), rank).backward()
            optimizer.step()
            by_step.step()
        by_epoch.step()
    if not again:
        torch.save((seen, model.state_dict()), f"whole-{rank}")
    else:
        whole, values = torch.load(f"whole-{rank}")
        assert len(whole) == 9 and seen == whole[4:], (seen, whole)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in values.items())
    fleet.stop_worker()
    """
    for _ in range(2):
        for process in trainers(body):
            _, err = process.communicate(timeout=200)
            assert process.returncode == 0, err


@pytest.mark.timeout(240)
def test_a_checkpoint_brings_every_trainer_back_to_the_bit_and_serves_parameter_servers_too(
    trainers, tmp_path
):
    body = """
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    rank = fleet.worker_index()
    model = build(seed=rank)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = fleet.distributed_optimizer(adam, model=model)
    fleet.init_worker()

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    assert fleet.load_check_point("saves") == fleet.TrainStatus()
    train(range(3))
    fleet.save_check_point("saves", fleet.TrainStatus(0, state={"rank": rank}))
    fleet.barrier_worker()
    expected = train(range(3, 5))
    status = fleet.load_check_point("saves")
    assert (status.next(), status.step, status.state, fleet.step) == (1, 3, {"rank": 0}, 3)
    found = train(range(3, 5))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(found[name], value) for name, value in fleet.export_state_dict().items())
    assert int(fleet.all_reduce_worker(rank, mode="max")) == 1
    assert fleet.all_reduce_worker(torch.tensor([rank + 3]), mode="min").tolist() == [3]
    fleet.stop_worker()
    """
    for process in trainers(body):
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    with loopback(
        tmp_path / "saves",
        servers=2,
        model=build,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    ) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        assert trainer.current_step == 3
        saved = Checkpoint(tmp_path / "saves" / "checkpoint-0").piece("0.weight", 0, 48, (8, 6))
        assert torch.equal(model.state_dict()["0.weight"], saved.value)
        assert torch.equal(trainer.fetch_state()["0.weight"]["exp_avg"], saved.state["exp_avg"])


ADOPTED = """
import datetime
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", rank=RANK, world_size=2, timeout=datetime.timedelta(seconds=60))
torch.distributed.barrier()  # who ends before the other has met it takes torch's store along
fleet.init()
model = build(seed=rank)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
fleet.init_worker()
loss_of(model, 0, rank).backward()
optimizer.step()
values = torch.nn.utils.parameters_to_vector(model.parameters())
fleet.stop_worker()
both = [torch.empty_like(values) for _ in range(2)]
torch.distributed.all_gather(both, values)  # the script's group is still its own
assert torch.equal(*both)
torch.distributed.destroy_process_group()
"""


def test_a_process_group_of_the_scripts_own_is_adopted_and_left_to_it(trainers):
    for process in trainers(ADOPTED.replace("RANK", "rank").replace('["rank"]', '["RANK"]')):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_a_process_group_in_another_order_is_named(trainers):
    for process in trainers(ADOPTED.replace("RANK", "1 - rank").replace('["1 - rank"]', '["RANK"]')):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert "of 2, but to fleet.init it is trainer" in err


CONVERTED = """
fleet.init()
rank = fleet.worker_index()
model, alone = build(seed=0), build(seed=0)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
plain = torch.optim.SGD(alone.parameters(), lr=0.1)


def loss(module, step, trainer):
    x, y = batch(step, trainer)
    return torch.nn.functional.cross_entropy(module(x.to(module[0].weight.dtype)), y)


for step in range(6):
    if step in (2, 4):
        for module in (model, alone):
            module.to(torch.float64 if step == 2 else torch.bfloat16)
    optimizer.zero_grad()
    loss(model, step, rank).backward()
    optimizer.step()
    parts = [torch.autograd.grad(loss(alone, step, each), list(alone.parameters())) for each in range(2)]
    for parameter, one, other in zip(alone.parameters(), *parts):
        parameter.grad = (one + other) / 2
    plain.step()
    for one, other in zip(model.parameters(), alone.parameters()):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), step
fleet.stop_worker()
"""


def test_a_model_that_is_converted_on_the_way_trains_as_in_one_process(trainers):
    for process in trainers(CONVERTED):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
