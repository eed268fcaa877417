"""Train a small network on handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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

    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    train, test = load_data()
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True, num_workers=options.num_workers)
    total = options.epochs * len(loader)
    for epoch in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        step = (epoch + 1) * len(loader)
        score = accuracy(model, *test)
        print(f"step {step} of {total}: loss {loss.item():.4f}, test accuracy {score:.4f}")
    print(f"test accuracy: {accuracy(model, *test):.4f}")


if __name__ == "__main__":
    main()
