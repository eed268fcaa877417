"""Handwritten digits for convergence tests: data, a small network, and single-process training."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from sklearn.datasets import load_digits

BATCH = 32
_TEST = 360


@lru_cache(maxsize=1)
def scans() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels in a fixed random order; the first 360 samples are the test set."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def batches(epochs: int, share: int = 0, of: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over the batches of one trainer's share of the training set."""
    images, labels = (part[_TEST:][share::of] for part in scans())
    generator = torch.Generator().manual_seed(share)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(BATCH):
            yield images[chosen], labels[chosen]


def network() -> torch.nn.Module:
    """Return a network that is initialized identically in every process and sliced over two servers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> float:
    """Return the fraction of the test set that the model classifies correctly."""
    images, labels = (part[:_TEST] for part in scans())
    return float((model(images).argmax(1) == labels).float().mean())


def train(model: torch.nn.Module, step: Callable[[], None], epochs: int, share: int = 0, of: int = 1) -> None:
    """Train a model on a share of the training set."""
    for images, labels in batches(epochs, share, of):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        step()
