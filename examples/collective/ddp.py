"""Train a small network on handwritten digits with DistributedDataParallel: nothing of fleet in it.

The environment that a FleetJob, ``python -m fleet.launch`` and torchrun give is the same.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 30
BATCH = 32
TEST_SAMPLES = 360


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    train = TensorDataset(images[TEST_SAMPLES:], labels[TEST_SAMPLES:])
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train)
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 10 == 9:
            print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        with torch.no_grad():
            correct = network(images[:TEST_SAMPLES]).argmax(1) == labels[:TEST_SAMPLES]
        print(f"test accuracy: {correct.float().mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
