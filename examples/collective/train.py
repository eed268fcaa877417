"""Train a small network on handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleet.collective import fleet

BATCH = 32
TEST_SAMPLES = 360


def load_data() -> tuple[TensorDataset, tuple[torch.Tensor, ...]]:
    """Return the training set, and the images and labels of the test set: 1437 and 360 scans of digits."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    train = TensorDataset(images[TEST_SAMPLES:], labels[TEST_SAMPLES:])
    return train, (images[:TEST_SAMPLES], labels[:TEST_SAMPLES])


def share_of(data: TensorDataset, index: int, number: int) -> TensorDataset:
    """Return one trainer's samples: as many as any other's, because gradients are averaged batch by batch."""
    size = len(data) // number
    return TensorDataset(*(column[index::number][:size] for column in data.tensors))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--bf16", action="store_true", help="let gradients travel as bfloat16")
    parser.add_argument("--local-sgd", type=int, metavar="K", help="average parameters after every K-th step")
    options = parser.parse_args()

    fleet.init()
    torch.manual_seed(0)
    model = build_model()
    strategy = fleet.DistributedStrategy(wire_dtype="bfloat16" if options.bf16 else None)
    if options.local_sgd:
        strategy.local_sgd = fleet.LocalSGD(k_steps=options.local_sgd)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = fleet.distributed_optimizer(sgd, strategy)
    fleet.init_worker()
    train, test = load_data()
    train = share_of(train, fleet.worker_index(), fleet.worker_num())
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True, num_workers=options.num_workers)
    total = options.epochs * len(loader)
    for epoch, loader in fleet.epochs(options.epochs, loader):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        step = (epoch + 1) * len(loader)
        score = accuracy(model, *test)
        fleet.report({"test_accuracy": score}, step=step, total_steps=total, loss=loss, samples=step * BATCH)
    fleet.stop_worker()
    print(f"test accuracy: {accuracy(model, *test):.4f}")


if __name__ == "__main__":
    main()
