"""Trains TorchRec's DLRM twice: with TorchRec's tables in this process, and with ours on parameter servers.

Two trainers have a half of each batch; each also trains the twin on the whole batch, and compares.
"""

from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fleet as names
from fleet.parameter_server import fleet

FEATURES = ["user", "item", "seen"]
DIM, BATCH, STEPS = 8, 16, 2
CONFIGS = [
    EmbeddingBagConfig(name="t_users", embedding_dim=DIM, num_embeddings=50, feature_names=["user"]),
    EmbeddingBagConfig(
        name="t_items",
        embedding_dim=DIM,
        num_embeddings=100,
        feature_names=["item", "seen"],
        pooling=PoolingType.MEAN,
    ),
]


def dlrm(collection: torch.nn.Module) -> Any:
    """Return the model, with the same layers in every process."""
    torch.manual_seed(0)
    return DLRM(
        embedding_bag_collection=collection,
        dense_in_features=5,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[16, 1],
    )


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def batch_of(step: int) -> tuple[torch.Tensor, list[list[torch.Tensor]], torch.Tensor]:
    """Return counts, ids by feature and sample, some of none, and labels."""
    generator = torch.Generator().manual_seed(step)
    ids = [
        [torch.randint(50, (int(size),), generator=generator) for size in sizes]
        for sizes in torch.randint(4, (len(FEATURES), BATCH), generator=generator)
    ]
    counts = torch.rand(BATCH, 5, generator=generator)
    return counts, ids, torch.randint(2, (BATCH,), generator=generator).float()


def loss(model: torch.nn.Module, step: int, samples: slice) -> torch.Tensor:
    """Return the loss of some samples of a step."""
    counts, ids, labels = batch_of(step)
    mine = [each for of_feature in ids for each in of_feature[samples]]
    lengths = torch.tensor([each.numel() for each in mine])
    batch = KeyedJaggedTensor.from_lengths_sync(FEATURES, torch.cat(mine), lengths)
    return loss_of(model(counts[samples], batch).squeeze(1), labels[samples])


def twin(tables: dict[str, torch.Tensor]) -> Any:
    """Return TorchRec's own model, trained on all samples from these rows on."""
    collection = EmbeddingBagCollection(tables=CONFIGS)
    for name, rows in tables.items():
        collection.embedding_bags[name].weight.data.copy_(rows)
    model = dlrm(collection)
    optimizer = adagrad(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, slice(None)).backward()
        optimizer.step()
    return model


def rows_of(collection: names.nn.EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    """Return all rows of our tables."""
    with torch.no_grad():
        return {
            table.name: names.nn.DistributedEmbedding(table.num_embeddings, DIM, table=table)(
                torch.arange(table.num_embeddings or 0)
            )
            for table in collection.distributed_tables
        }


def main() -> None:
    fleet.init()
    collection = names.nn.EmbeddingBagCollection(tables=CONFIGS)
    model = dlrm(collection)
    optimizer = fleet.distributed_optimizer(adagrad(model))
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    begun = rows_of(collection)
    fleet.barrier_worker()
    mine = slice(fleet.worker_index(), None, fleet.worker_num())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, mine).backward()
        optimizer.step()
    expected = twin(begun)
    layers = {name: value for name, value in expected.state_dict().items() if "embedding_bags" not in name}
    found = {name: value for name, value in model.state_dict().items() if name in layers}
    assert found.keys() == layers.keys(), (found.keys(), layers.keys())
    for name, value in layers.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    tables = expected.sparse_arch.embedding_bag_collection.embedding_bags
    for name, rows in rows_of(collection).items():
        assert not torch.equal(rows, begun[name])
        torch.testing.assert_close(rows, tables[name].weight.detach(), rtol=0, atol=1e-6)
    print(f"equal after {STEPS} steps: {len(layers)} of layers, {len(begun)} tables", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
