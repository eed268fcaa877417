"""The loops of docs/collective.md, run as they stand there, train as one process with all trainers' data."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "collective.md").read_text()
RECIPES = re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
LOOPS = {title: code for title, code in RECIPES if "batches" in code}

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
