"""Learn which advertisements are clicked, from several of Criteo's files at once."""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fleet.datasets.criteo import Batch, CriteoFiles
from fleet.datasets.criteo_generator import write
from fleet.parameter_server import fleet

IDS, DIMENSION = 1_000_001, 10


class Clicks(nn.Module):
    """One table for all categories, and three layers of 400."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(13 + 26 * DIMENSION, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 1),
        )
        self.table = fleet.nn.DistributedEmbedding(IDS, DIMENSION, name="categories", first_values=0.0)

    def forward(self, counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(torch.cat([counts, self.table(ids).flatten(1)], dim=1))
        return logits.squeeze(1)


def generate(directory: Path, lines: int) -> tuple[list[str], list[str]]:
    """Write files of Criteo's format, for those who have none: four to train on and two to test on."""
    files = [str(directory / f"{number}.gz") for number in range(6)]
    for seed, file in enumerate(files):
        best = write(Path(file), lines // 4, seed=seed)
    print(f"AUC of a perfect model on the last file: {best:.4f}")
    return files[:4], files[4:]


def batches(files: list[str], batch_size: int) -> Iterator[Batch]:
    """Read as many lines of each file at once, until one ends."""
    readers = [CriteoFiles([file], batch_size // len(files)) for file in files]
    for parts in zip(*readers, strict=False):
        yield Batch(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def auc(model: nn.Module, files: list[str]) -> float:
    found = fleet.metrics.auc()
    for counts, ids, labels in CriteoFiles(files, 50):
        found.update(torch.sigmoid(model(counts, ids)), labels)
    return found.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs="+", help="Criteo's files to train on")
    parser.add_argument("--test", nargs="+", help="and to test on")
    parser.add_argument("--generate", type=int, default=20_000, help="lines, where no file is given")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    options = parser.parse_args()

    fleet.init()
    torch.manual_seed(0)
    model = Clicks()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=options.lr))
    if fleet.is_server():
        return fleet.run_server()
    fleet.init_worker()
    train, test = options.train, options.test
    if not train or not test:
        train, test = generate(Path(tempfile.mkdtemp()), options.generate)
    train, test = map(fleet.split_files, (train, test))
    for step, (counts, ids, labels) in enumerate(batches(train, options.batch_size), start=1):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(counts, ids), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.7f}")
    print(f"test AUC: {auc(model, test):.4f}")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
