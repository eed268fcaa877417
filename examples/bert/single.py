"""Train BERT on a text: to find words that are hidden, and to tell whether one piece follows another."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model import BERT, evaluate, groups_of, losses, rate
from text import Pieces, read, split, vocabulary
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="a document each; without one, Python's manual")
    parser.add_argument("--words", type=int, default=30_522, help="size of the vocabulary at most")
    parser.add_argument("--length", type=int, default=128, help="words of both pieces")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs of pieces in a step of one process")
    parser.add_argument("--parts", type=int, default=1, help="compute each batch in so many parts")
    parser.add_argument("--lr", type=float, default=1e-4, help="highest learning rate")
    parser.add_argument("--warm-up", type=float, default=0.01, help="part of the steps")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--print-every", type=int, default=100, metavar="STEPS")
    options = parser.parse_args()

    rank, processes = 0, 1
    torch.manual_seed(rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    documents, others = split(read(options.files))
    numbers = vocabulary(documents, options.words)
    train, test = (Pieces(each, numbers, options.length) for each in (documents, others))
    shape = (options.layers, options.width, options.heads, options.dropout)
    model = BERT(len(numbers), *shape, longest=max(512, options.length)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups_of(model, decay=0.01), lr=options.lr)
    sampler: DistributedSampler[Any] = DistributedSampler(train, processes, rank, drop_last=True)
    loader = DataLoader(train, options.batch_size, sampler=sampler, drop_last=True)
    steps = options.epochs * len(loader)
    schedule = partial(rate, warm_up=int(options.warm_up * steps), steps=steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        train.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            mean = torch.zeros((), device=device)
            for part in range(options.parts):
                loss, _, _ = losses(model, *(each[part :: options.parts].to(device) for each in batch))
                loss = loss / options.parts
                loss.backward()
                mean += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if scheduler.last_epoch % options.print_every == 0:
                print(f"step {scheduler.last_epoch} of {steps}: loss {mean.item():.7f}")
    loss, words, follows = evaluate(model, DataLoader(test, options.batch_size), device)
    print(f"test loss: {loss:.4f}")
    print(f"hidden words found: {words:.4f}")
    print(f"what follows is told: {follows:.4f}")


if __name__ == "__main__":
    main()
