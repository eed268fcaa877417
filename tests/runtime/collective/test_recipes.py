"""Loops of the documentation, run as they stand there.

Those of docs/collective.md train as one process with all trainers' data; that of docs/checkpoints.md goes on
after its trainers were killed.
"""

import signal

import pytest

from tests.support.documents import block, blocks

LOOPS = {
    each.section: each.code
    for each in blocks("docs/collective.md")
    if each.language == "python" and "batches" in each.code
}

BODY = """
import contextlib
from types import SimpleNamespace

fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
loss_fn = torch.nn.functional.cross_entropy

def run(code, model, optimizer, ranks, fleet):
    batches = []
    for step in range(6):
        shares = [batch(step, each) for each in ranks]
        if "GradScaler" in code and step == 2 and 1 in ranks:
            shares[-1][0].mul_(1e38)  # overflows, on trainer 1 alone
        batches.append(tuple(torch.cat(columns) for columns in zip(*shares)))
    before = [each.detach().clone() for each in model.parameters()]
    exec(code, globals() | locals())
    assert all(torch.isfinite(each).all() for each in model.parameters())
    assert not torch.equal(before[0], model[0].weight)
    return [each.detach() for each in model.parameters()] + [torch.tensor(optimizer.param_groups[0]["lr"])]

one = SimpleNamespace(worker_num=lambda: 1, all_reduce_worker=lambda number: number)
found, expected = {}, {}
for title, code in LOOPS.items():
    for results, ranks, here in ((found, [rank], fleet), (expected, range(size), one)):
        model = build(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if here is fleet:
            optimizer = fleet.distributed_optimizer(optimizer, model=model)
        else:
            optimizer.no_sync = contextlib.nullcontext
        results[title] = run(code, model, optimizer, ranks, here)
fleet.stop_worker()
for title in LOOPS:
    print(title, file=sys.stderr)
    torch.testing.assert_close(found[title], expected[title], rtol=1e-4, atol=1e-6)
"""


def test_every_loop_of_the_page_trains_as_in_one_process(trainers):
    assert len(LOOPS) == 5, list(LOOPS)
    for process in trainers(f"LOOPS = {LOOPS!r}\n{BODY}"):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


BUILT = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
model, alone = build(seed=rank), build(seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exec(CODE)
plain = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
    plain.zero_grad()
    (sum(loss_of(alone, step, each) for each in range(size)) / size).backward()
    plain.step()
fleet.stop_worker()
for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found, expected, rtol=WITHIN, atol=WITHIN)
"""


@pytest.mark.parametrize(("section", "within"), [("Collective training", 1e-5), ("Fewer bytes", 1e-2)])
def test_an_optimizer_of_the_page_averages(trainers, section, within):
    for process in trainers(f"CODE, WITHIN = {block('docs/collective.md', section)!r}, {within}\n{BUILT}"):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


SCALED = """
import signal

fleet.init()
rank = fleet.worker_index()
folder, dies = os.environ["FOLDER"], "DIES" in os.environ
loader = [batch(step, rank) for step in range(4)]
model = build(seed=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = fleet.distributed_optimizer(optimizer, model=model)
began = []

def loss_fn(outputs, targets):
    began.append(fleet.step)
    if fleet.step == 6 and dies:
        while not pathlib.Path(folder, "checkpoint-0", "manifest.json").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    return loss * float("inf") if fleet.step in (1, 9) and rank == 1 else loss  # overflows on trainer 1 alone

exec(CODE.replace("30", "3").replace("/checkpoint", folder))
fleet.stop_worker()
assert fleet.step == 12
ended = [*model.parameters(), torch.tensor([*scaler.state_dict().values()])]
if folder == "whole":
    torch.save(ended, f"ended-{rank}.pt")
else:
    assert began == list(range(4, 12)), began
    assert all(torch.equal(*pair) for pair in zip(ended, torch.load(f"ended-{rank}.pt"), strict=True))
"""


def test_a_job_with_a_gradscaler_goes_on_to_the_bit_after_its_trainers_were_killed(trainers):
    code = block("docs/checkpoints.md", "A GradScaler's scale")
    body = f"CODE = {code!r}\n{SCALED}"
    for life, status in (
        ({"FOLDER": "whole"}, 0),
        ({"FOLDER": "cut", "DIES": "1"}, -signal.SIGKILL),
        ({"FOLDER": "cut"}, 0),
    ):
        for process in trainers(body, **life)[-2:]:
            _, err = process.communicate(timeout=100)
            assert process.returncode == status, err
