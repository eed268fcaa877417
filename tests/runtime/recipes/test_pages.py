"""Blocks of the pages about parameter servers, each in a script of two trainers and two servers.

A reader puts such a block into a script of their own; here that script is the smallest one that has what the
block speaks of.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import torch

from tests.support.documents import block
from tests.support.replicas import job

PRELUDE = """
import contextlib, os, sys
import torch
from torch import nn
from fleet.parameter_server import fleet

torch.set_num_threads(1)
loss_fn = nn.functional.mse_loss

def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(24, 8, generator=generator)
    return list(zip(inputs.split(4), (inputs.sum(1, keepdim=True) / 8).split(4)))

def serve():
    fleet.run_server()
    sys.exit()

fleet.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
loader = batches_of(fleet.worker_index()) if fleet.is_worker() else []
"""


def script(folder: Path, *parts: str) -> Path:
    """Write a script of the prelude and these parts."""
    path = folder / "script.py"
    path.write_text(PRELUDE + "\n".join(textwrap.dedent(part) for part in parts))
    return path


def run_successfully(folder: Path, *parts: str, servers: int = 2, **environ: Any) -> list[str]:
    """Run a script in every role; fail unless each ends with status 0. Return what the trainers wrote."""
    with job(folder, servers, 2, **environ) as started:
        serving, training = started.start(script(folder, *parts))
        for replica in [*training, *serving]:
            replica.expect(0)
        return [replica.output for replica in training]


def _with(shown: str, training: str) -> str:
    """Put the steps of a training where a block has three dots."""
    [(dots, indent)] = re.findall(r"(^( +)\.\.\.\n)", shown, re.MULTILINE)
    return shown.replace(dots, textwrap.indent(textwrap.dedent(training), indent))


MODEL_WITH_USERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(10, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, ids):
        return self.last(self.users(ids))

model = Model()
loader = [(torch.arange(first, first + 4) * 10**7, torch.full((4, 1), 0.5)) for first in range(0, 24, 4)]
"""


def test_a_table_takes_the_place_of_an_embedding_and_its_rows_are_fetched_ahead(tmp_path):
    table = block("docs/tables.md", "Tables on the parameter servers")
    loop = block("docs/tables.md", "Rows of the next batch")
    training = """
        losses.append(loss_fn(model(ids), target))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    """
    loop = _with(loop, training)
    started = "losses = []\nif fleet.is_server(): serve()\nfleet.init_worker()\n"
    ended = "assert losses[-1] < losses[0] / 2, losses\nassert len(losses) == 60\nfleet.stop_worker()\n"
    run_successfully(tmp_path, MODEL_WITH_USERS, table, started, loop, ended)


def test_options_of_a_table_are_carried_out(tmp_path):
    section = "Options of embedding tables"
    rows = """
        from pathlib import Path
        from safetensors.torch import save_file

        Path("served").mkdir(exist_ok=True)
        kept = f"served/{os.getpid()}"
        save_file({"ids": torch.tensor([7, 9]), "rows": torch.full((2, 16), 3.0)}, kept)
        os.replace(kept, "served/users.safetensors")
    """
    loop = """
        begun = fleet.nn.DistributedEmbedding(None, 16, table=warm)
        model = nn.ModuleDict({"embedding": embedding, "bag": bag, "warm": begun})
        optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        if fleet.is_server(): serve()
        fleet.init_worker()
        assert (model["warm"](torch.tensor([7, 9])) == 3.0).all()
        begun = model["embedding"](torch.tensor([5])).detach()
        for updates in range(4):  # the third time an id comes, it gets a row
            optimizer.zero_grad()
            pooled = model["bag"](torch.tensor([[5, 6]])).sum()
            (model["embedding"](torch.tensor([5])).sum() + pooled).backward()
            optimizer.step()
            fleet.barrier_worker()
        assert not torch.equal(model["embedding"](torch.tensor([5])), begun)
        fleet.stop_worker()
    """
    blocks = [block("docs/row-options.md", section, position=position) for position in (0, 1)]
    run_successfully(tmp_path, f"os.chdir({str(tmp_path)!r})", rows, *blocks, loop)


def test_a_job_goes_on_from_its_newest_checkpoint(tmp_path):
    training = """
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
    """
    main = block("docs/checkpoints.md", "Checkpoints").replace("fleet.init()\n", "")
    main = main.replace("30", "EPOCHS").replace("/checkpoint", str(tmp_path / "saves"))
    main = f"def main(loader):\n{textwrap.indent(_with(main, training), '    ')}\nmain(loader)\n"
    epochs = 'EPOCHS = int(os.environ["EPOCHS"])\n'
    told = 'print("steps:", fleet.step)\n'
    for number, begun in ((4, 0), (6, 24)):
        for output in run_successfully(tmp_path, epochs, main, told, EPOCHS=str(number)):
            assert f"at step {begun} with" in output
            assert f"steps: {number * 6}\n" in output
        assert len(list((tmp_path / "saves").glob("checkpoint-*"))) == 3


def test_most_saves_of_a_job_with_tables_are_of_what_has_changed(tmp_path):
    shown = block("docs/checkpoints.md", "Rows of tables")
    saves = tmp_path / "saves"
    training = """
        for ids, target in loader:
            optimizer.zero_grad()
            loss_fn(model(ids), target).backward()
            optimizer.step()
    """
    loop = shown.replace("100", "12").replace("/checkpoint", str(saves))
    loop = _with(loop, training)
    table = block("docs/tables.md", "Tables on the parameter servers")
    started = "if fleet.is_server(): serve()\nfleet.init_worker()\n"
    run_successfully(tmp_path, MODEL_WITH_USERS, table, started, loop, "fleet.stop_worker()\n")
    found = {path.parent.name: json.loads(path.read_text()) for path in saves.glob("*/manifest.json")}
    bases = {
        name: {
            entry["rows"]["base"] and entry["rows"]["base"]["directory"]
            for entry in save["files"]
            if entry["rows"]
        }
        for name, save in found.items()
    }
    whole = {f"checkpoint-{number}": {None} for number in (0, 10)}
    changes = {f"checkpoint-{number}": {f"checkpoint-{number // 10 * 10}"} for number in (*range(1, 10), 11)}
    assert bases == whole | changes


def test_servers_are_given_weights_that_a_script_writes(tmp_path):
    shown = block("docs/transpiler.md", "Weights that a script writes")
    loop = f"""
critic = model
optimizer = fleet.distributed_optimizer(torch.optim.SGD(critic.parameters(), lr=0.5))
if fleet.is_server(): serve()
fleet.init_worker()
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_fn(critic(inputs), targets).backward()
{textwrap.indent(shown, "    ")}
assert max(each.abs().max() for each in critic.parameters()) <= 0.01
fleet.stop_worker()
"""
    run_successfully(tmp_path, loop)


def test_two_networks_of_one_optimizer_have_learning_rates_of_their_own(tmp_path):
    shown = block("docs/transpiler.md", "Two optimizers")
    loop = """
if fleet.is_server(): serve()
fleet.init_worker()
assert [group["lr"] for group in optimizer.param_groups] == [4e-4, 1e-4]
before = [[each.detach().clone() for each in net.parameters()] for net in (discriminator, generator)]
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_fn(discriminator(generator(inputs)), targets).backward()
    optimizer.step()
for net, begun, lr in zip((discriminator, generator), before, (4e-4, 1e-4)):
    moved = max((now - then).abs().max() for now, then in zip(net.parameters(), begun))
    assert 0 < moved <= 6.5 * lr, (moved, lr)
fleet.stop_worker()
"""
    run_successfully(tmp_path, "generator, discriminator = nn.Linear(8, 8), nn.Linear(8, 1)\n", shown, loop)


def test_a_mode_of_one_s_own_trains(tmp_path):
    shown = block("docs/modes.md", "Your own mode")
    loop = """
if fleet.is_server(): serve()
with torch.no_grad():  # before the other trainer, which need not wait, has made steps
    first = loss_fn(model(loader[0][0]), loader[0][1]).item()
fleet.init_worker()
for epoch in range(20):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
assert loss < first / 2, (loss, first)
fleet.stop_worker()
"""
    run_successfully(tmp_path, "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n", shown, loop)


PROGRAMS = """
import fleet

config = fleet.DistributeTranspilerConfig()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer_id = 1

def loss_fn(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)

"""


def test_the_transpiler_gives_the_programs_of_every_replica():
    names = {"torch": torch}
    exec(PROGRAMS + block("docs/transpiler.md", "The transpiler"), names)  # noqa: S102
    transpiler = names["transpiler"]
    assert "send" in [op.type for op in transpiler.get_trainer_program().global_block().ops]
    served, startup = transpiler.get_pserver_programs("10.0.0.1:6174")
    assert [op.type for op in served.global_block().ops] == ["listen_and_serv"]
    assert startup.global_block().ops
