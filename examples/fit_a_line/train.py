"""Fit a line with parameter servers, in the program form: capture, transpile, run.

Each process reads its place from the environment itself and does what its role asks.
"""

import os

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleet

BATCH = 16
EPOCHS = 60
TEST_SAMPLES = 42


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 10 measurements of each of 442 patients, and the progression of their diabetes a year later."""
    diabetes = load_diabetes()
    order = torch.randperm(len(diabetes.target), generator=torch.Generator().manual_seed(0))
    features = torch.tensor(diabetes.data, dtype=torch.float32)[order]
    target = torch.tensor(diabetes.target, dtype=torch.float32)[order, None]
    return features / features.std(0), (target - target.mean()) / target.std()


def squared_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def main() -> None:
    torch.manual_seed(0)
    x, y = load_data()
    model = nn.Linear(x.shape[1], 1)
    program = fleet.Program.capture(model, squared_error, torch.optim.SGD(model.parameters(), lr=0.01))

    executor = fleet.Executor(fleet.CPUPlace())
    trainer_id, trainers = 0, 1
    if role := os.environ.get("PADDLE_TRAINING_ROLE"):  # PSERVER or TRAINER; without a job there is none
        port = os.environ["PADDLE_PSERVER_PORT"]  # the same for every parameter server
        pservers = ",".join(f"{ip}:{port}" for ip in os.environ["PADDLE_PSERVER_IPS"].split(","))
        trainers = int(os.environ["PADDLE_TRAINERS"])  # how many there are
        trainer_id = int(os.environ.get("PADDLE_TRAINER_ID", "0"))  # only trainers have one

        transpiler = fleet.DistributeTranspiler()
        transpiler.transpile(trainer_id, program=program, pservers=pservers, trainers=trainers)
        if role == "PSERVER":
            endpoint = os.environ["PADDLE_CURRENT_IP"] + ":" + os.environ["PADDLE_PORT"]  # this server's own
            executor.run(transpiler.get_startup_program(endpoint))
            executor.run(transpiler.get_pserver_program(endpoint))
            return
        program = transpiler.get_trainer_program()

    executor.run(fleet.default_startup_program())
    train = slice(TEST_SAMPLES + trainer_id, None, trainers)
    loader = DataLoader(TensorDataset(x[train], y[train]), BATCH, shuffle=True, drop_last=True)
    total = EPOCHS * len(loader)
    for epoch, batches in fleet.epochs(EPOCHS, loader):
        for features, target in batches:
            feed = {"x": features, "y": target}
            (loss,) = executor.run(program, feed=feed, fetch_list=["loss"])
        step = (epoch + 1) * len(loader)
        fleet.report(step=step, total_steps=total, loss=loss.item(), samples=step * BATCH)
    executor.close()
    with torch.no_grad():
        error = squared_error(model, x[:TEST_SAMPLES], y[:TEST_SAMPLES]).item()
    fleet.report({"test_error": error})
    print(f"test error: {error:.4f}, where always guessing the mean gives about 1")


if __name__ == "__main__":
    main()
