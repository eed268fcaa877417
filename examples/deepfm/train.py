"""Learn which advertisements are clicked by DeepFM: a factorization machine, and layers over its vectors."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from fleet.datasets import CriteoFiles
from fleet.datasets.criteo_generator import write
from fleet.metrics import AUC
from fleet.parameter_server import fleet

COUNTS, FIELDS = 13, 39
FEATURES, DIMENSION = 1_086_461, 10


class DeepFM(nn.Module):
    """A weight and a vector for each feature, which is a category, or a count with its value.

    The logit is the sum of the weights, of the products of every two vectors, and of what three layers of 400
    make of the vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FIELDS * DIMENSION, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 1),
        )
        self.weights = fleet.nn.DistributedEmbedding(FEATURES, 1, name="weights", first_values=0.0)
        self.vectors = fleet.nn.DistributedEmbedding(FEATURES, DIMENSION, name="vectors", first_values=0.0)

    def forward(self, counts: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        of_counts = torch.arange(COUNTS).expand(len(counts), COUNTS)
        ids = torch.cat([of_counts, COUNTS + categories], dim=1)
        values = torch.cat([counts, torch.ones_like(categories, dtype=counts.dtype)], dim=1).unsqueeze(2)
        vectors = self.vectors(ids) * values
        first_order = (self.weights(ids) * values).sum(dim=(1, 2))
        second_order = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        logits: torch.Tensor = first_order + second_order + self.layers(vectors.flatten(1)).squeeze(1)
        return logits


def lines_of(files: list[Path], batch_size: int, share: tuple[int, int] = (0, 1)) -> CriteoFiles:
    return CriteoFiles(files, batch_size, hash_size=FEATURES - COUNTS, share=share)


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
    for counts, categories, labels in lines_of([file], 100):
        found.update(torch.sigmoid(model(counts, categories)), labels)
    return found.compute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="Criteo's; the last one is to test on")
    parser.add_argument("--generate", type=int, default=20_000, help="lines, where no file is given")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    options = parser.parse_args()

    fleet.init()
    torch.manual_seed(0)
    model = DeepFM()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=options.lr))
    if fleet.is_server():
        return fleet.run_server()
    fleet.init_worker()
    files = options.files or generate(Path(tempfile.mkdtemp()), options.generate)
    data = lines_of(files[:-1], options.batch_size, (fleet.worker_index(), fleet.worker_num()))
    for step, (counts, categories, labels) in enumerate(DataLoader(data, batch_size=None), start=1):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(counts, categories), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.7f}")
    print(f"test AUC: {auc(model, files[-1]):.4f}")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
