"""Training that goes on in other processes is that of one that was never ended, to the bit."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import flip_a_bit

BODY = """
fleet.init()
rank, phase = fleet.worker_index(), os.environ["PHASE"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))
model.extra = torch.nn.Parameter(torch.ones(9000))
matrices = [each for each in model.parameters() if each.dim() > 1]
vectors = [each for each in model.parameters() if each.dim() == 1]  # no weight decay
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(groups, lr=0.01), model=model)
fleet.init_worker()
fleet.load_check_point(phase.partition("-")[0])

while fleet.step < 20:
    if phase == "parts-first" and fleet.step == int(os.environ["SAVED_AT"]):
        fleet.save_check_point("parts", fleet.TrainStatus())
        break
    if phase == "parts-then":
        assert fleet.step >= int(os.environ["SAVED_AT"])
    optimizer.zero_grad()
    loss = loss_of(model, fleet.step, rank)
    if fleet.step < int(os.environ["EXTRA_UNTIL"]):
        loss = loss + model.extra.square().mean() * torch.tensor([0.1, 0.3, 0.7, 1.1])[rank]
    loss.backward()
    optimizer.step()
else:
    torch.save(model.state_dict(), f"{phase}-{rank}")
fleet.stop_worker()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("saved_at", "extra_until"),
    [
        pytest.param(10, 20, id="all-are-used"),
        pytest.param(10, 5, id="one-is-not-used-any-more"),
        pytest.param(6, 5, id="the-next-pass-decides-the-order"),
    ],
)
def test_four_trainers_go_on_to_the_bit(trainers, tmp_path, saved_at, extra_until):
    for phase in ("whole", "parts-first", "parts-then"):
        started = trainers(
            BODY,
            ranks=(0, 1, 2, 3),
            size=4,
            PHASE=phase,
            SAVED_AT=str(saved_at),
            EXTRA_UNTIL=str(extra_until),
        )
        for process in started[-4:]:
            _, err = process.communicate(timeout=200)
            assert process.returncode == 0, err
    whole, parts = (torch.load(tmp_path / f"{phase}-0") for phase in ("whole", "parts-then"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


WITH_A_TEACHER = """
fleet.init()
rank, phase = fleet.worker_index(), os.environ["PHASE"]
torch.manual_seed(phase == "parts-then")
model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in ("a", "b", "teacher")})
model["teacher"].requires_grad_(False)
trained = [*model["a"].parameters(), *model["b"].parameters()]
optimizer = fleet.distributed_optimizer(torch.optim.Adam(trained, lr=0.01), model=model)
fleet.init_worker()
model["a"].requires_grad_(not (phase == "parts-then" and FROZEN_AT_LOAD))
fleet.load_check_point(phase.partition("-")[0])
assert phase != "parts-then" or fleet.step == 10

while fleet.step < 20:
    if phase == "parts-first" and fleet.step == 10:
        fleet.save_check_point("parts", fleet.TrainStatus())
        break
    model["a"].requires_grad_(fleet.step not in FROZEN)
    optimizer.zero_grad()
    x, y = batch(fleet.step, rank)
    found = model["b"](model["a"](x))
    loss = torch.nn.functional.cross_entropy(found, y) + (found - model["teacher"](x)).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(model["teacher"].parameters(), model["b"].parameters(), strict=True):
            slow.lerp_(fast, 0.1)
else:
    torch.save(model.state_dict(), f"{phase}-{rank}")
fleet.stop_worker()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("frozen", "frozen_at_load"),
    [
        pytest.param((), False, id="a-teacher"),
        pytest.param((8, 9, 10), False, id="a-layer-at-the-save"),
        pytest.param((8, 9, 10), True, id="a-layer-at-the-save-and-the-load"),
        pytest.param((), True, id="a-layer-at-the-load"),
    ],
)
def test_what_is_frozen_goes_on_to_the_bit(trainers, tmp_path, frozen, frozen_at_load):
    body = WITH_A_TEACHER.replace("FROZEN_AT_LOAD", repr(frozen_at_load)).replace("FROZEN", repr(frozen))
    for phase in ("whole", "parts-first", "parts-then"):
        for process in trainers(body, PHASE=phase)[-2:]:
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
    whole = torch.load(tmp_path / "whole-0")
    for rank in (0, 1):
        parts = torch.load(tmp_path / f"parts-then-{rank}")
        assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []


SAVES_AND_LOADS = """
fleet.init()
rank = fleet.worker_index()
model = build(0)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
fleet.init_worker()

def weights():
    return [value.sum().item() for value in model.state_dict().values()]

if os.environ["PHASE"] == "save":
    for epoch in range(4):
        optimizer.zero_grad()
        loss_of(model, epoch, rank).backward()
        optimizer.step()
        fleet.save_check_point("whole", fleet.TrainStatus(epoch))
        print(json.dumps(weights()))
else:
    for folder in os.environ["FOLDERS"].split():
        status = fleet.load_check_point(folder.replace("RANK", str(rank)))
        print(json.dumps([folder, status.epoch_no, fleet.step, weights()]), flush=True)
fleet.stop_worker()
"""


def damaged(folder: Path, name: str, where: str, how: str = "a-bit", number: int = 3) -> Path:
    """Copy all checkpoints to a folder, and damage a file of one."""
    if not (folder / name).exists():
        shutil.copytree(folder / "whole", folder / name)
    (path,) = (folder / name / f"checkpoint-{number}").glob(where)
    if how == "a-bit":
        flip_a_bit(path)
    else:
        path.unlink()
        {"a-fifo": os.mkfifo, "a-directory": os.mkdir, "a-link": lambda it: it.symlink_to("nowhere")}[how](
            path
        )
    return path


def json_lines(file: Path) -> list[Any]:
    """Read what a trainer has printed, without what Gloo of older PyTorch releases prints."""
    return [json.loads(line) for line in file.read_text().splitlines() if not line.startswith("[Gloo]")]


@pytest.mark.timeout(300)
def test_what_is_damaged_costs_one_save_on_every_trainer(trainers, tmp_path):
    def run(phase: str, folders: Sequence[str] = ()) -> list[tuple[int, str]]:
        processes = trainers(SAVES_AND_LOADS, PHASE=phase, FOLDERS=" ".join(folders))[-2:]
        errors = [process.communicate(timeout=120)[1] for process in processes]
        return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]

    assert [code for code, _ in run("save")] == [0, 0]
    weights = json_lines(tmp_path / "output-0")
    told = {
        f"{kind}-{how}": damaged(tmp_path, f"{kind}-{how}", f"{kind}*", how)
        for kind in ("shard", "trainer", "manifest")
        for how in ("a-bit", "a-fifo", "a-directory", "a-link")
        if (kind, how) != ("manifest", "a-bit")  # which may be one that says nothing
    }
    manifest = tmp_path / "shard-a-bit" / "checkpoint-2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 7'))
    # What each trainer sees may differ: 0 lacks the newest, and 1 the one before and the one before that.
    apart = [damaged(tmp_path, "apart-0", "shard*"), damaged(tmp_path, "apart-1", "trainer*", number=2)]
    apart.append(damaged(tmp_path, "apart-1", "shard*", "a-fifo", number=1))
    found = run("load", [*told, "apart-RANK"])
    assert [code for code, _ in found] == [0, 0], found
    epochs = {"shard-a-bit": 1, "apart-RANK": 0}
    expected = [
        [name, epoch, epoch + 1, weights[epoch]]
        for name in [*told, "apart-RANK"]
        for epoch in [epochs.get(name, 2)]
    ]
    for rank in (0, 1):
        assert json_lines(tmp_path / f"output-{rank}") == expected
    warnings = [line for line in found[0][1].splitlines() if "skipped a damaged checkpoint" in line]
    assert len(warnings) == len(expected)
    assert "skipped a damaged checkpoint" not in found[1][1], "trainer 0 tells it for all"
    for (name, path), warning in zip(told.items(), warnings, strict=False):
        named = path.parent if name.startswith("manifest") else path
        assert str(named.relative_to(tmp_path)) in warning
        assert f"Training continues from {name}/checkpoint-{epochs.get(name, 2)}" in warning
    assert all(str(path.relative_to(tmp_path)) in warnings[-1] for path in apart)
    assert "trainer 1 (127.0.0.1:" in warnings[-1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("named", ["folder", "checkpoint"])
def test_without_a_whole_save_no_trainer_begins(trainers, tmp_path, named):
    for process in trainers(SAVES_AND_LOADS, PHASE="save")[-2:]:
        process.communicate(timeout=120)
        assert process.returncode == 0
    for number in range(1 if named == "checkpoint" else 0, 4):
        path = damaged(tmp_path, "none", "trainer*", number=number)
    folder = "none" if named == "folder" else "none/checkpoint-3"
    for process in trainers(SAVES_AND_LOADS, PHASE="load", FOLDERS=folder)[-2:]:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 2, error
        assert f"{path.relative_to(tmp_path)} has the SHA-256" in error
        assert "Traceback" not in error
        if named == "checkpoint":
            assert "newest complete checkpoint of that folder is none/checkpoint-0: load it, or none" in error
