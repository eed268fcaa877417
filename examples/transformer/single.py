"""Train a Transformer to translate sentences."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from grammar import pairs
from model import Transformer, rate, translate
from sentences import PAD, Pairs, Vocabulary, padded, read
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def tell(model: Transformer, vocabulary: Vocabulary, test: list[tuple[str, str]], device: str) -> None:
    """Print translations of the test's first sentences, and how many of all are right to the word."""
    model.eval()
    source, _ = padded(list(Pairs(test, vocabulary)))
    found = [vocabulary.decode(each) for each in translate(model, source.to(device), 2 * source.shape[1])]
    for (sentence, _), translation in list(zip(test, found, strict=True))[:3]:
        print(f"{sentence} -> {translation}")
    right = sum(translation == wanted for translation, (_, wanted) in zip(found, test, strict=True))
    print(f"test accuracy: {right / len(test):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a pair in each line, a tabulator between both")
    parser.add_argument(
        "--generate", type=int, default=100_000, help="pairs of a small grammar, without a file"
    )
    parser.add_argument("--test", type=int, default=100, help="pairs at the end that are not trained on")
    parser.add_argument("--words", type=int, default=37_000, help="size of the vocabulary at most")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="pairs in a step of one process")
    parser.add_argument("--parts", type=int, default=1, help="compute each batch in so many parts")
    parser.add_argument("--warm-up", type=int, default=4000, metavar="STEPS")
    parser.add_argument("--layers", type=int, default=6, help="of encoder and decoder each")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--print-every", type=int, default=100, metavar="STEPS")
    options = parser.parse_args()

    rank, processes = 0, 1
    torch.manual_seed(rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = read(options.file) if options.file else pairs(options.generate)
    known, test = known[: -options.test], known[-options.test :]
    vocabulary = Vocabulary((sentence for pair in known for sentence in pair), options.words)
    shape = (options.layers, options.width, options.heads, options.dropout)
    model = Transformer(len(vocabulary), *shape).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(
        model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9
    )
    train = Pairs(known, vocabulary)
    sampler: DistributedSampler[Any] = DistributedSampler(train, processes, rank, drop_last=True)
    loader = DataLoader(train, options.batch_size, sampler=sampler, drop_last=True, collate_fn=padded)
    steps = options.epochs * len(loader)
    schedule = partial(rate, width=options.width, warm_up=options.warm_up)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for sources, targets in loader:
            optimizer.zero_grad()
            mean = torch.zeros((), device=device)
            for part in range(options.parts):
                source = sources[part :: options.parts].to(device)
                target = targets[part :: options.parts].to(device)
                logits = model(source, target[:, :-1])
                loss = criterion(logits.transpose(1, 2), target[:, 1:]) / options.parts
                loss.backward()
                mean += loss.detach()
            optimizer.step()
            scheduler.step()
            if scheduler.last_epoch % options.print_every == 0:
                print(f"step {scheduler.last_epoch} of {steps}: loss {mean.item():.7f}")
    tell(model, vocabulary, test, device)


if __name__ == "__main__":
    main()
