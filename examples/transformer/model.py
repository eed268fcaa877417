"""The Transformer, and how its learning rate goes: Vaswani et al. 2017, arXiv:1706.03762."""

import torch
from sentences import BEGIN, END, PAD
from torch import nn


class Transformer(nn.Module):
    """From a sentence and the words before each place of its translation, to logits of the word there.

    One matrix embeds the words of both languages, and makes logits of vectors.

    Parameters
    ----------
    words : int
        In the vocabulary.
    layers, width, heads : int
        Of encoder and decoder each; (6, 512, 8) is the paper's base model.
    dropout : float
    """

    def __init__(
        self, words: int, layers: int = 6, width: int = 512, heads: int = 8, dropout: float = 0.1
    ) -> None:
        super().__init__()
        shape = (width, heads, 4 * width, dropout)
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        self.dropout = nn.Dropout(dropout)
        encoder = nn.TransformerEncoderLayer(*shape, batch_first=True)
        decoder = nn.TransformerDecoderLayer(*shape, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits, float32[n, places, words], of int64[n, words of the source], int64[n, places]."""
        return self.decode(self.encode(source), source, target)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(self.embed(source), src_key_padding_mask=source == PAD)
        return encoded

    def decode(self, encoded: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        places = target.shape[1]
        later = torch.ones(places, places, dtype=torch.bool, device=target.device).triu(1)
        decoded = self.decoder(
            self.embed(target), encoded, later, tgt_is_causal=True, memory_key_padding_mask=source == PAD
        )
        return nn.functional.linear(decoded, self.embedding.weight)

    def embed(self, numbers: torch.Tensor) -> torch.Tensor:
        width = self.embedding.embedding_dim
        embedded = self.embedding(numbers) * width**0.5 + positions(numbers.shape[1], width).to(
            numbers.device
        )
        dropped: torch.Tensor = self.dropout(embedded)
        return dropped


def positions(number: int, width: int) -> torch.Tensor:
    """Return waves of `width` lengths at so many places: float32[number, width]."""
    rates = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(number).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def rate(step: int, width: int, warm_up: int) -> float:
    """Return the learning rate of a step, counted from 0: it grows evenly, then falls as 1 / sqrt(step)."""
    made = step + 1
    return float(width**-0.5 * min(made**-0.5, made * warm_up**-1.5))


@torch.no_grad()
def translate(model: Transformer, source: torch.Tensor, longest: int) -> list[list[int]]:
    """Return translations, each word the likeliest one behind those before it: so many at most."""
    encoded = model.encode(source)
    found = torch.full((len(source), 1), BEGIN, device=source.device)
    for _ in range(longest):
        likeliest = model.decode(encoded, source, found)[:, -1].argmax(1, keepdim=True)
        found = torch.cat([found, likeliest], dim=1)
        if bool((found == END).any(dim=1).all()):
            break
    numbers: list[list[int]] = found.tolist()
    return numbers
