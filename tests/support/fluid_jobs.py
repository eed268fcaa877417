"""Example models that are trained one after another, as a transpiled job or in one process.

As a program, this module is one replica; its argument is the folder for results. Each case has separate
servers, on consecutive ports.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleet import fluid
from tests.support import fluid_models
from tests.support.fluid_models import Model

STEPS, TRAINERS, IDS = 6, 2, 40
LIMIT = 0.05
"""The maximum norm of a clipped gradient."""


class Case(NamedTuple):
    """A model and the way in which it is trained."""

    model: Callable[..., Model]
    optimizer: Callable[[], Any]
    sync: bool = True
    reader: bool = False
    summed: bool = False
    """True if the loss is the sum over the samples instead of the mean."""
    unsliced: bool = False
    geo: bool = False
    fetches: bool = True
    huge: bool = False
    """True if the tables are too large for one process; their values are then not seeded."""


def _decayed() -> Any:
    return fluid.layers.exponential_decay(0.5, decay_steps=2, decay_rate=0.5, staircase=True)


def _clipped() -> Any:
    return fluid.optimizer.Momentum(0.1, 0.9, grad_clip=fluid.clip.GradientClipByGlobalNorm(LIMIT))


def _by_value() -> Any:
    clip = fluid.clip.GradientClipByValue(0.02, -0.01)
    return fluid.optimizer.SGD(0.05, regularization=fluid.regularizer.L2Decay(0.01), grad_clip=clip)


def _by_norm() -> Any:
    return fluid.optimizer.Adam(0.01, grad_clip=fluid.clip.GradientClipByNorm(LIMIT))


def _ctr() -> Model:
    return fluid_models.ctr(ids=IDS, hidden=8, pool=True)


def _distributed_ctr() -> Model:
    return fluid_models.ctr(ids=IDS, hidden=8, pool=True, distributed=True, accuracy=False)


def _word2vec() -> Model:
    return fluid_models.word2vec(ids=IDS, width=4, negatives=2)


def _deepfm() -> Model:
    return fluid_models.deepfm(ids=IDS, hidden=8)


def _l2() -> Any:
    return fluid.optimizer.SGD(0.05, regularization=fluid.regularizer.L2Decay(0.01))


CASES: dict[str, Case] = {
    "mlp": Case(fluid_models.mlp, _clipped),
    "mlp_unsliced": Case(fluid_models.mlp, lambda: fluid.optimizer.RMSProp(0.01), unsliced=True),
    "word2vec": Case(_word2vec, lambda: fluid.optimizer.SGD(_decayed())),
    "word2vec_adam": Case(_word2vec, lambda: fluid.optimizer.Adam(0.05)),
    "ctr": Case(_ctr, lambda: fluid.optimizer.SGD(0.02), summed=True),
    "distributed_ctr": Case(_distributed_ctr, lambda: fluid.optimizer.Adam(0.01), summed=True),
    "word2vec_copied": Case(_word2vec, lambda: fluid.optimizer.Adam(0.05, lazy_mode=True), fetches=False),
    "ctr_copied": Case(_ctr, lambda: fluid.optimizer.Adagrad(0.02), summed=True, fetches=False),
    "distributed_ctr_decayed": Case(
        _distributed_ctr,
        lambda: fluid.optimizer.Adam(fluid.layers.piecewise_decay([1, 3], [0.02, 0.01, 0.005])),
        summed=True,
    ),
    "mlp_by_norm": Case(fluid_models.mlp, _by_norm),
    "word2vec_by_value": Case(_word2vec, _by_value),
    "deepfm": Case(_deepfm, _l2, summed=True),
    "simnet_bow": Case(
        lambda given=None: fluid_models.simnet_bow(ids=IDS, width=4, given=given),
        lambda: fluid.optimizer.SGD(0.5),
        reader=True,
    ),
    "async_mlp_clipped": Case(fluid_models.mlp, _clipped, sync=False),
    "async_mlp_by_norm": Case(fluid_models.mlp, _by_norm, sync=False),
    "async_word2vec_by_value": Case(_word2vec, _by_value, sync=False),
    "geo_mlp_clipped": Case(fluid_models.mlp, _clipped, sync=False, geo=True),
    "async_word2vec": Case(_word2vec, lambda: fluid.optimizer.SGD(_decayed()), sync=False),
    "geo_mlp": Case(fluid_models.mlp, lambda: fluid.optimizer.Adagrad(0.05), sync=False, geo=True),
    "geo_word2vec": Case(_word2vec, lambda: fluid.optimizer.SGD(0.5), sync=False, geo=True),
    "async_word2vec_copied": Case(_word2vec, lambda: fluid.optimizer.SGD(0.5), sync=False, fetches=False),
    "geo_word2vec_copied": Case(
        _word2vec, lambda: fluid.optimizer.SGD(0.5), sync=False, geo=True, fetches=False
    ),
    "huge_word2vec": Case(
        lambda: fluid_models.word2vec(ids=10**10, width=4, negatives=2),
        lambda: fluid.optimizer.SGD(0.5),
        huge=True,
    ),
    "async_mlp": Case(fluid_models.mlp, lambda: fluid.optimizer.Adam(0.01), sync=False),
}


def _samples(random: np.random.Generator, variable: Any) -> list[Any]:
    """Draw a trainer's samples of a variable, as an array or as sequences of ids."""
    _, *shape = variable.shape
    if variable.lod_level:
        lengths = [1] * 4
        if not variable.name.startswith(("input", "true", "neg_label")):
            lengths = [int(length) for length in random.integers(1, 4, 4)]
        elif variable.name.startswith("neg"):
            lengths = [2] * 4
        return [random.integers(0, IDS, (length, 1)) for length in lengths]
    if variable.dtype == "int64":
        most = IDS if shape != [1] else 2
        return list(random.integers(0, most, (4, *shape)))
    if variable.name in ("label", "y"):
        return list(random.integers(0, 2, (4, *shape)).astype("float32"))
    return list(random.random((4, *shape)).astype("float32"))


def feeds(data: list[Any], trainers: list[int], steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """Draw each step's feed, which concatenates the samples of the given trainers."""
    random = np.random.default_rng(3)
    for _ in range(steps):
        drawn = [[_samples(random, variable) for variable in data] for _ in range(TRAINERS)]
        found: dict[str, Any] = {}
        for position, variable in enumerate(data):
            samples = [sample for trainer in trainers for sample in drawn[trainer][position]]
            if variable.lod_level:
                lengths = [len(sample) for sample in samples]
                found[variable.name] = fluid.create_lod_tensor(
                    np.concatenate(samples), [lengths], fluid.CPUPlace()
                )
            else:
                found[variable.name] = np.stack(samples)
        yield found


def build(case: Case, *, parts: int) -> tuple[Model, Any]:
    """Build a model and minimize its loss; return the model, and its reader or None."""
    main, startup = fluid.default_main_program(), fluid.default_startup_program()
    main.random_seed = startup.random_seed = 0 if case.huge else 7
    readers: list[Any] = []

    def given(data: list[Any]) -> list[Any]:
        loader = fluid.io.DataLoader.from_generator(feed_list=data, capacity=2, iterable=False)
        readers.append(loader)
        return data

    model = case.model(given=given) if case.reader else case.model()
    loss = fluid.layers.scale(model.loss, 1.0 / parts) if case.summed else model.loss
    case.optimizer().minimize(loss)
    return model._replace(loss=loss), readers[0] if readers else None


def train(executor: Any, program: Any, model: Model, reader: Any, trainers: list[int]) -> dict[str, Any]:
    """Train for all steps; return the losses, a test loss, gradient norms, and the final parameters."""
    batches = feeds(model.data, trainers)
    if reader is not None:
        reader.set_batch_generator(lambda: ([feed[each.name] for each in model.data] for feed in batches))
        reader.start()
    losses, norms = [], []
    weights = [each.name for each in program.global_block().all_parameters() if each.name == "fc_0.w_0"]
    for _ in range(STEPS):
        feed = next(batches) if reader is None else None
        (loss,) = executor.run(program, feed=feed, fetch_list=[model.loss])
        losses.append(float(loss))
        # A fetched gradient is the one before clipping, as Paddle's is; the step leaves the clipped one.
        scope = fluid.global_scope()
        norms += [float(np.linalg.norm(scope.values[name].grad)) for name in weights]  # type: ignore[arg-type]
    (feed,) = feeds(model.data, trainers, steps=1)
    (tested,) = executor.run(program.clone(for_test=True), feed=feed, fetch_list=[model.loss])
    held = {each.name: scope.find_var(each.name) for each in program.global_block().all_parameters()}
    values = {name: np.array(each.get_tensor()).tolist() for name, each in held.items() if each is not None}
    return {"losses": losses, "tested": float(tested), "norms": norms, "values": values}


def alone(name: str) -> dict[str, Any]:
    """Train a case in this process, on the samples of all trainers."""
    own = fluid.program_guard(fluid.Program(), fluid.Program())
    with own, fluid.unique_name.guard(), fluid.scope_guard(fluid.core.Scope()):
        model, reader = build(CASES[name], parts=TRAINERS)
        executor = fluid.Executor(fluid.CPUPlace())
        executor.run(fluid.default_startup_program())
        return train(executor, fluid.default_main_program(), model, reader, list(range(TRAINERS)))


def _replica(name: str, endpoints: list[str], own: str, trainer: int) -> dict[str, Any] | None:
    model, reader = build(CASES[name], parts=1)
    config = fluid.DistributeTranspilerConfig()
    config.remote_prefetch = CASES[name].fetches
    config.slice_var_up = not CASES[name].unsliced
    config.runtime_split_send_recv = not CASES[name].sync and not CASES[name].geo
    if CASES[name].geo:
        config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, 2
    transpiler = fluid.DistributeTranspiler(config)
    transpiler.transpile(trainer, pservers=",".join(endpoints), trainers=TRAINERS, sync_mode=CASES[name].sync)
    executor = fluid.Executor(fluid.CPUPlace())
    if own:
        served, startup = transpiler.get_pserver_programs(own)
        executor.run(startup)
        executor.run(served)
        return None
    trained = transpiler.get_trainer_program()
    executor.run(fluid.default_startup_program())
    found = train(executor, trained, model, reader, [trainer])
    executor.close()
    return found


def main(folder: Path) -> None:
    """Run this replica's share of the job of each case, one case after another."""
    server = os.environ["TRAINING_ROLE"] == "PSERVER"
    trainer = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    hosts = [endpoint.split(":") for endpoint in os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")]
    results: dict[str, Any] = {}
    for position, name in enumerate(CASES):
        endpoints = [f"{host}:{int(port) + len(hosts) * position}" for host, port in hosts]
        own = endpoints[[port for _, port in hosts].index(os.environ["PADDLE_PORT"])] if server else ""
        guard = fluid.program_guard(fluid.Program(), fluid.Program())
        with guard, fluid.unique_name.guard(), fluid.scope_guard(fluid.core.Scope()):
            results[name] = _replica(name, endpoints, own, trainer)
    if not server:
        (folder / f"trainer-{trainer}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
