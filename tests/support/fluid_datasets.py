"""A replica that trains a built program on files read through a pipe command, in a job or in one process.

As a program, this module takes the folder of files and results, and optionally the kind of training:
``collective``, or ``alone`` with twice the batch size; the default is parameter servers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fleet import fluid
from fleet.collective import fleet as collective
from fleet.parameter_server import fleet as served

BATCH, FILES, LINES, EPOCHS = 4, 2, 10, 2
"""Each of the two trainers has `FILES` files of `LINES` lines."""
GENERATOR = """
import fleet.fluid.incubate.data_generator as dg

class Words(dg.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def samples():
            words = [int(word) for word in line.split()]
            yield [("words", words), ("label", [int(sum(words) > 20)])]
        return samples

Words().run_from_stdin()
"""


def write(folder: Path) -> None:
    """Write data files for two trainers and for one process, and the command that reads them."""
    random = np.random.default_rng(5)
    (folder / "generator.py").write_text(GENERATOR)
    batches = []
    for trainer in range(2):
        lines = [
            " ".join(map(str, random.integers(0, 12, random.integers(1, 5)))) for _ in range(FILES * LINES)
        ]
        for number in range(FILES):
            part = lines[number * LINES : (number + 1) * LINES]
            (folder / f"part-{trainer}-{number}").write_text("\n".join(part) + "\n")
        batches.append([lines[at : at + BATCH] for at in range(0, len(lines), BATCH)])
    together = [line for both in zip(*batches, strict=True) for batch in both for line in batch]
    (folder / "whole").write_text("\n".join(together) + "\n")


def main(folder: Path, how: str) -> None:
    """Run this replica."""
    fluid.default_main_program().random_seed = fluid.default_startup_program().random_seed = 7
    words = fluid.layers.data(name="words", shape=[1], dtype="int64", lod_level=1)
    label = fluid.layers.data(name="label", shape=[1], dtype="int64")
    rows = fluid.layers.embedding(
        input=words, size=[12, 4], is_sparse=True, param_attr=fluid.ParamAttr(name="table")
    )
    hidden = fluid.layers.fc(input=fluid.layers.sequence_pool(rows, "sum"), size=8, act="tanh")
    predicted = fluid.layers.fc(input=hidden, size=2, act="softmax")
    loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predicted, label=label))
    optimizer: Any = fluid.optimizer.SGD(0.2)
    fleet: Any = {"collective": collective, "served": served}.get(how)
    if fleet is not None:
        fleet.init()
        optimizer = fleet.distributed_optimizer(optimizer)
    optimizer.minimize(loss)
    if fleet is served and fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    if fleet is served:
        fleet.init_worker()
    files = sorted(map(str, folder.glob("whole" if fleet is None else "part-*")))
    dataset = fluid.DatasetFactory().create_dataset("QueueDataset")
    dataset.set_use_var([words, label])
    dataset.set_batch_size(BATCH if fleet is not None else 2 * BATCH)
    dataset.set_filelist(fleet.split_files(files) if fleet is not None else files)
    dataset.set_pipe_command(f"{sys.executable} {folder / 'generator.py'}")
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    program = fluid.default_main_program()
    for _ in range(EPOCHS):
        executor.train_from_dataset(
            program, dataset, fetch_list=[loss], fetch_info=["cost"], print_period=1, thread=1
        )
    scope: Any = fluid.global_scope()
    names = [name for name in scope.values if name.endswith((".w_0", ".b_0"))]
    values = {name: np.array(scope.find_var(name).get_tensor()).tolist() for name in names}
    executor.infer_from_dataset(program, dataset, fetch_list=[loss], fetch_info=["tested"], print_period=1)
    for name, value in values.items():
        assert np.array(scope.find_var(name).get_tensor()).tolist() == value
    index = 0 if fleet is None else fleet.worker_index()
    (folder / f"trainer-{index}.json").write_text(json.dumps(values))
    if fleet is not None:
        fleet.stop_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
