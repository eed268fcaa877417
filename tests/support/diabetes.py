"""The diabetes data set for convergence tests: a regression task and its score."""

from collections.abc import Callable
from functools import lru_cache

import torch
from sklearn.datasets import load_diabetes

BATCH = 15
_TEST = 82


@lru_cache(maxsize=1)
def patients() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled features and targets in a fixed random order; the first 82 samples are the test set."""
    diabetes = load_diabetes()
    order = torch.randperm(len(diabetes.target), generator=torch.Generator().manual_seed(0))
    features = torch.tensor(diabetes.data, dtype=torch.float32)[order]
    target = torch.tensor(diabetes.target, dtype=torch.float32)[order, None]
    return features / features.std(0), (target - target.mean()) / target.std()


def network() -> torch.nn.Module:
    """Return a network that is initialized identically in every process."""
    torch.manual_seed(0)
    return torch.nn.Linear(10, 1)


@torch.no_grad()
def explained_variance(model: torch.nn.Module) -> float:
    """Return the coefficient of determination (R squared) on the test set."""
    features, target = (part[:_TEST] for part in patients())
    return float(1 - (model(features) - target).square().mean() / target.var())


def train(model: torch.nn.Module, step: Callable[[], None], epochs: int, share: int = 0, of: int = 1) -> None:
    """Train a model on a share of the training set."""
    features, target = (part[_TEST:][share::of] for part in patients())
    generator = torch.Generator().manual_seed(share)
    for _ in range(epochs):
        for chosen in torch.randperm(len(target), generator=generator).split(BATCH):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(features[chosen]), target[chosen]).backward()
            step()
