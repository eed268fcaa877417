"""Learn which advertisements are clicked, from Criteo's logs: 13 counts and 26 categories a line."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from fleet.datasets import CriteoFiles
from fleet.datasets.criteo_generator import write
from fleet.metrics import AUC

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
        self.table = nn.Embedding(IDS, DIMENSION, sparse=True)
        nn.init.zeros_(self.table.weight)

    def forward(self, counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(torch.cat([counts, self.table(ids).flatten(1)], dim=1))
        return logits.squeeze(1)


def generate(directory: Path, lines: int) -> list[Path]:
    """Write files of Criteo's format, for those who have not the real ones; the last one is to test on."""
    files = [directory / "train.gz", directory / "test.gz"]
    for seed, (path, share) in enumerate(zip(files, (1.0, 0.2), strict=True)):
        best = write(path, int(lines * share), seed=seed)
    print(f"AUC of a perfect model: {best:.4f}")
    return files


@torch.no_grad()
def auc(model: nn.Module, file: Path) -> float:
    found = AUC(lambda counts: counts)
    for counts, ids, labels in CriteoFiles([file], 500):
        found.update(torch.sigmoid(model(counts, ids)), labels)
    return found.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="Criteo's; the last one is to test on")
    parser.add_argument("--generate", type=int, default=20_000, help="lines, where no file is given")
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.Adam(model.layers.parameters(), lr=options.lr)
    of_rows = torch.optim.SparseAdam(model.table.parameters(), lr=options.lr)
    files = options.files or generate(Path(tempfile.mkdtemp()), options.generate)
    data = CriteoFiles(files[:-1], options.batch_size)
    for step, (counts, ids, labels) in enumerate(DataLoader(data, batch_size=None), start=1):
        optimizer.zero_grad()
        of_rows.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(counts, ids), labels)
        loss.backward()
        optimizer.step()
        of_rows.step()
        print(f"step {step}: loss {loss.item():.7f}")
    print(f"test AUC: {auc(model, files[-1]):.4f}")


if __name__ == "__main__":
    main()
