"""Gradients that leave while the backward pass still runs, whatever the order of the optimizer's groups."""

import pytest

NOTED = """
import functools
from fleet.collective import trainer

events = []
all_reduce = torch.distributed.all_reduce

def noted(*given, **options):
    events.append("leaves")
    return all_reduce(*given, **options)

torch.distributed.all_reduce = noted  # the rounding hook's own calls: a bucket as it is leaves without one
trainer.GradientAverager = functools.partial(trainer.GradientAverager, bucket_bytes=4 * 64 * 64)
fleet.init()
rank = fleet.worker_index()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
if UNUSED:
    model.register_parameter("last", torch.nn.Parameter(torch.ones(64)))
matrices = [each for each in model.parameters() if each.dim() > 1]
vectors = [each for each in model.parameters() if each.dim() == 1]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
strategy = fleet.DistributedStrategy(wire_dtype="float16")
sgd = fleet.distributed_optimizer(torch.optim.SGD(groups, lr=0.1), strategy, model=model)
for each in model.parameters():
    each.register_post_accumulate_grad_hook(lambda _: events.append("comes"))
for step in range(4):
    sgd.zero_grad()
    loss = model(torch.full((1, 64), 1.0 + rank)).sum()
    events.clear()
    loss.backward()
    if step:  # the first pass tells the order
        before = events[: events.index("leaves")].count("comes")
        assert before < events.count("comes") / 2, events
    sgd.step()
fleet.stop_worker()
"""


@pytest.mark.parametrize("unused", [False, True], ids=["all-are-used", "the-last-is-never-used"])
def test_the_first_bucket_leaves_before_half_of_the_gradients_have_come(trainers, unused):
    for process in trainers(NOTED.replace("UNUSED", str(unused))):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
