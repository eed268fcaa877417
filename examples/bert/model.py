"""BERT: Devlin et al. 2018, arXiv:1810.04805."""

from collections.abc import Iterable
from typing import Any

import torch
from text import BETWEEN, NOT_HIDDEN
from torch import nn


class BERT(nn.Module):
    """From two pieces of a text to logits of the words that are hidden, and of whether they follow.

    Parameters
    ----------
    words : int
        In the vocabulary.
    layers, width, heads : int
        (12, 768, 12) is the paper's base model.
    dropout : float
    longest : int
        Words of both pieces at most, signs included.
    """

    def __init__(
        self,
        words: int,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
        longest: int = 512,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(longest, width)
        self.pieces = nn.Embedding(2, width)
        self.embedded = nn.Sequential(nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.follows = nn.Linear(width, 2)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.bias = nn.Parameter(torch.zeros(words))
        self.apply(begin)

    def forward(self, words: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the words at chosen places, and of whether the second piece follows.

        Parameters
        ----------
        words : int64[n, length]
        chosen : bool[n, length]

        Returns
        -------
        tuple of float32[chosen places, words in the vocabulary] and float32[n, 2]
        """
        ends = words == BETWEEN
        pieces = ends.cumsum(1) - ends.long()
        places = torch.arange(words.shape[1], device=words.device)
        embedded = self.embedded(self.words(words) + self.places(places) + self.pieces(pieces))
        encoded = self.encoder(embedded)
        logits = nn.functional.linear(self.transform(encoded[chosen]), self.words.weight, self.bias)
        return logits, self.follows(self.pooler(encoded[:, 0]))


def begin(module: nn.Module) -> None:
    """Give a module the values that BERT begins with."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def losses(
    model: nn.Module, words: torch.Tensor, hidden: torch.Tensor, is_next: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, and whether each hidden word and each question of what follows is answered right."""
    chosen = hidden != NOT_HIDDEN
    of_words, of_next = model(words, chosen)
    loss = nn.functional.cross_entropy(of_words, hidden[chosen]) + nn.functional.cross_entropy(
        of_next, is_next
    )
    return loss, of_words.argmax(1) == hidden[chosen], of_next.argmax(1) == is_next


def groups_of(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups: weights decay, biases and what normalizes does not."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": decay},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]


def rate(step: int, warm_up: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, as a part of the highest: up and down evenly."""
    if step < warm_up:
        return (step + 1) / warm_up
    return max(0.0, (steps - step) / max(1, steps - warm_up))


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[list[torch.Tensor]], device: str
) -> tuple[float, float, float]:
    """Return the mean loss of some batches, and how many of words and of what follows are right, of 1."""
    model.eval()
    found = [losses(model, *(each.to(device) for each in batch)) for batch in batches]
    loss, words, follows = ([each[number].float().reshape(-1) for each in found] for number in range(3))
    return float(torch.cat(loss).mean()), float(torch.cat(words).mean()), float(torch.cat(follows).mean())
