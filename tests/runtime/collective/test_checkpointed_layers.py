"""Layers that the backward pass computes once more: a step exchanges one model, or is refused by name."""

from textwrap import dedent

CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
from fleet.process import progress

STEPS = 3

class Classifier(torch.nn.Module):
    def __init__(self, reentrant, frozen):
        super().__init__()
        self.reentrant = reentrant
        self.words = torch.nn.Embedding(16, 32)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = torch.nn.Linear(32, 3).requires_grad_(not frozen)

    def forward(self, tokens):
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return self.head(hidden.mean(1))

def exchanged():
    return progress.snapshot()["counters"].get("bytes_reduced", 0)

def trained(**how):
    torch.manual_seed(0)
    model = Classifier(**how)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(parameters, lr=0.1), model=model)
    one = sum(each.numel() * each.element_size() for each in parameters)
    for step in range(STEPS):
        before = exchanged()
        optimizer.zero_grad()
        tokens = torch.arange(8).view(2, 4) + rank + 2 * step
        torch.nn.functional.cross_entropy(model(tokens), torch.tensor([0, rank])).backward()
        optimizer.step()
        assert one <= exchanged() - before < 1.05 * one, (exchanged() - before, one)  # the notes beside it
    values = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    most, least = (fleet.all_reduce_worker(values, mode=mode) for mode in ("max", "min"))
    assert torch.equal(most, least)
    return values

fleet.init()
rank = fleet.worker_index()
"""


def test_reentrant_checkpoints_exchange_one_model_a_step_where_what_follows_them_is_trained(trainers):
    body = """
    expected = trained(reentrant=False, frozen=False)
    torch.testing.assert_close(trained(reentrant=True, frozen=False), expected)
    fleet.stop_worker()
    """
    for process in trainers(CHECKPOINTED + dedent(body)):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_reentrant_checkpoints_are_refused_by_name_where_the_head_is_frozen(trainers, tmp_path):
    body = """
    trained(reentrant=False, frozen=True)
    pathlib.Path(f"others-{rank}").touch()
    trained(reentrant=True, frozen=True)
    """
    for rank, process in enumerate(trainers(CHECKPOINTED + dedent(body))):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert (tmp_path / f"others-{rank}").exists()
        assert "came from within a reentrant checkpoint" in err
        assert "pass use_reentrant=False to torch.utils.checkpoint" in err
        assert "Traceback" not in err
