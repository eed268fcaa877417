"""Train ResNet-50 on pictures in folders, one folder per class."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model import ResNet, rate
from pictures import Pictures
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, int]], device: str) -> float:
    model.eval()
    right = sum(int((model(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in loader)
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has train/CLASS/*.jpg and val/CLASS/*.jpg")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256, help="pictures in a step of one process")
    parser.add_argument("--parts", type=int, default=1, help="compute each batch in so many parts")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--warm-up", type=int, default=5, metavar="EPOCHS")
    parser.add_argument("--size", type=int, default=224, help="pixels of an edge")
    parser.add_argument("--layers", type=int, nargs=4, default=(3, 4, 6, 3), help="blocks of each stage")
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--num-workers", type=int, default=8, help="processes that load pictures")
    parser.add_argument("--print-every", type=int, default=100, metavar="STEPS")
    options = parser.parse_args()

    rank, processes = 0, 1
    torch.manual_seed(rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = Pictures(options.folder / "train", options.size, by_chance=True)
    test = Pictures(options.folder / "val", options.size, by_chance=False)
    model = ResNet(len(train.classes), options.layers, options.width).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4
    )
    sampler: DistributedSampler[Any] = DistributedSampler(train, processes, rank, drop_last=True)
    batches = partial(DataLoader, batch_size=options.batch_size, num_workers=options.num_workers)
    loader = batches(train, sampler=sampler, drop_last=True)
    steps = options.epochs * len(loader)
    schedule = partial(rate, warm_up=options.warm_up * len(loader), steps=steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        train.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            mean = torch.zeros((), device=device)
            for part in range(options.parts):
                logits = model(images[part :: options.parts].to(device))
                wanted = labels[part :: options.parts].to(device)
                loss = nn.functional.cross_entropy(logits, wanted, label_smoothing=0.1) / options.parts
                loss.backward()
                mean += loss.detach()
            optimizer.step()
            scheduler.step()
            if scheduler.last_epoch % options.print_every == 0:
                print(f"step {scheduler.last_epoch} of {steps}: loss {mean.item():.7f}")
    print(f"test accuracy: {accuracy(model, batches(test), device):.4f}")


if __name__ == "__main__":
    main()
