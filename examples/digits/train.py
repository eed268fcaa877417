"""Train a small network on handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleet.parameter_server import fleet

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


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    options = parser.parse_args()

    fleet.init()
    torch.manual_seed(0)
    model = build_model()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9))
    if fleet.is_server():
        return fleet.run_server()
    fleet.init_worker()
    train, test = load_data()
    train = TensorDataset(*train[fleet.worker_index() :: fleet.worker_num()])
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
