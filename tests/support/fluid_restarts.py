"""A replica whose built program has state on its trainers: a schedule, batch_norm and auc.

As a program, this module takes the folder for results, the number of steps, the steps after which trainer 1
waits to be killed and trainer 0 saves (0 for never), and the step after which the script sets the schedule's
counter to 10. From that step on, the job loads checkpoints, not the script. The environment determines
whether there are parameter servers.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fleet import fluid
from fleet.collective import fleet as collective
from fleet.parameter_server import fleet as served

STATE = ("@LR_DECAY_COUNTER@", "mean", "variance")


def build(*, adaptive: bool) -> tuple[Any, list[Any], Any]:
    """Build the model; return its loss, the variables that hold auc's counts, and the optimizer."""
    fluid.default_main_program().random_seed = fluid.default_startup_program().random_seed = 7
    x, y = fluid.layers.data(name="x", shape=[8]), fluid.layers.data(name="y", shape=[1], dtype="int64")
    hidden = fluid.layers.fc(input=x, size=16)
    hidden = fluid.layers.batch_norm(
        input=hidden, act="relu", moving_mean_name="mean", moving_variance_name="variance"
    )
    predicted = fluid.layers.fc(input=hidden, size=2, act="softmax")
    _, _, counts = fluid.layers.auc(input=predicted, label=y, num_thresholds=63)
    loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predicted, label=y))
    rate = fluid.layers.exponential_decay(0.2, decay_steps=2, decay_rate=0.7)
    optimizer = fluid.optimizer.Adam(rate) if adaptive else fluid.optimizer.Momentum(rate, 0.9)
    return loss, counts, optimizer


def batch(step: int) -> dict[str, Any]:
    """Return the batch of a step, which is the same on all trainers so that their statistics are equal."""
    random = np.random.default_rng(step)
    x = random.random((8, 8)).astype("float32")
    return {"x": x, "y": (x.sum(1, keepdims=True) > 4).astype("int64")}


def main(folder: Path, steps: int, waits: int, saves: int, resets: int = 0) -> None:
    """Run this replica."""
    fleet: Any = served if "PADDLE_PSERVERS_IP_PORT_LIST" in os.environ else collective
    fleet.init()
    loss, counts, optimizer = build(adaptive=fleet is collective)
    fleet.distributed_optimizer(optimizer).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fleet.startup_program)
    checkpoints = str(folder / "checkpoints")
    if resets:
        fleet.load_check_point(executor, str(folder / "none"))
    elif Path(checkpoints).exists() and fleet is served:
        fluid.io.load_persistables(executor, checkpoints, fleet.main_program)
    else:
        fleet.load_check_point(executor, checkpoints)
    losses: dict[int, float] = {}
    while fleet.step < steps:
        step = fleet.step
        losses[step] = float(executor.run(fleet.main_program, feed=batch(step), fetch_list=[loss])[0])
        scope: Any = fluid.global_scope()
        if fleet.step == resets:
            scope.find_var("@LR_DECAY_COUNTER@").get_tensor().set(np.array([10], np.int64))
        if fleet.step == saves:
            if fleet is served:
                fluid.io.save_persistables(executor, checkpoints, fleet.main_program)
            else:
                fleet.save_persistables(executor, checkpoints)
            print("saved", flush=True)
        if (
            fleet.step == waits
            and fleet.worker_index() == 1
            and step > 0
            and not (folder / "killed").exists()
        ):
            print("waits", flush=True)
            time.sleep(600)
    names = [*STATE, *(each.name for each in counts)]
    names += [each for each in scope.values if "w_0" in each or "b_0" in each]  # includes Adam's moments
    values = {name: np.array(scope.find_var(name).get_tensor()).tolist() for name in names}
    found = {"losses": losses, "values": values}
    (folder / f"trainer-{fleet.worker_index()}.json").write_text(json.dumps(found))
    executor.close() if fleet is served else fleet.stop_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
