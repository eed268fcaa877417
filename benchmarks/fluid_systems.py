"""The systems of `benchmarks.fluid`: the quick start's model with fluid's layers or torch.nn.

Both models are programs that an executor runs. Without servers they train in one process; with servers, the
transpiled program trains in a job in sync mode.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.workload import LEARNING_RATE, Config, End, Step

__all__ = ["serve", "trainer"]

INPUTS: Final = 32
WIDTH: Final = 128
BATCH: Final = 128
_BATCHES: Final = 16


def _batches() -> list[dict[str, Any]]:
    """Return random batches, labelled by which half of the inputs has the larger sum."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(_BATCHES):
        x = torch.rand(BATCH, INPUTS, generator=generator)
        first, second = x.split(INPUTS // 2, 1)
        label = (first.sum(1, keepdim=True) > second.sum(1, keepdim=True)).long()
        found.append({"x": x.numpy(), "y": label.numpy()})
    return found


def _built() -> str:
    """Build the model with layers as the default program; return the name of the loss."""
    from fleet import fluid

    x = fluid.layers.data(name="x", shape=[INPUTS], dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="int64")
    hidden = fluid.layers.fc(input=x, size=WIDTH, act="tanh")
    hidden = fluid.layers.fc(input=hidden, size=WIDTH, act="tanh")
    predicted = fluid.layers.fc(input=[hidden], size=2, act="softmax")
    loss = fluid.layers.mean(x=fluid.layers.cross_entropy(input=predicted, label=y))
    fluid.optimizer.SGD(learning_rate=LEARNING_RATE).minimize(loss)
    return str(loss.name)


def _captured() -> str:
    """Capture the torch.nn model as the default program; return the name of the loss."""
    from fleet import fluid

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    )

    def loss_fn(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y.reshape(-1))

    fluid.Program.capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    return "loss"


def _program(config: Config) -> tuple[Any, str]:
    from fleet import fluid

    loss = _built() if config.system.endswith("layers") else _captured()
    if not config.num_servers:
        return None, loss
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(config.index, pservers=",".join(config.endpoints), trainers=config.num_trainers)
    return transpiler, loss


def trainer(config: Config) -> tuple[Step, End]:
    """Train with an executor, either in this process alone or in a job."""
    from fleet import fluid

    transpiler, loss = _program(config)
    program = transpiler.get_trainer_program() if transpiler else fluid.default_main_program()
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    batches, made = _batches(), 0

    def step(_: int) -> None:
        nonlocal made
        executor.run(program, feed=batches[made % _BATCHES], fetch_list=[loss])
        made += 1

    return step, executor.close


def serve(config: Config) -> None:
    """Run a transpiled server program until every trainer has finished."""
    from fleet import fluid

    transpiler, _ = _program(config)
    executor = fluid.Executor(fluid.CPUPlace())
    main, startup = transpiler.get_pserver_programs(config.endpoints[config.index])
    executor.run(startup)
    executor.run(main)
