"""Programs that are built with layers train in jobs as in one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fluid_jobs
from tests.support.replicas import job

SCRIPT = Path(fluid_jobs.__file__)
SYNC = [name for name, case in fluid_jobs.CASES.items() if case.sync and not case.huge]
APART = [name for name, case in fluid_jobs.CASES.items() if not case.sync or case.huge]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two trainers with two servers ended with, by case."""
    folder = tmp_path_factory.mktemp("jobs")
    root = str(SCRIPT.parents[2])
    with job(folder, 2, fluid_jobs.TRAINERS, len(fluid_jobs.CASES), PYTHONPATH=root) as running:
        servers, trainers = running.start(SCRIPT, str(folder))
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=240)
    return [json.loads((folder / f"trainer-{index}.json").read_text()) for index in range(2)]


@pytest.mark.parametrize("name", SYNC)
def test_two_servers_and_two_trainers_equal_one_process(name: str, trained: list[dict[str, Any]]) -> None:
    expected = fluid_jobs.alone(name)
    mean = np.mean([trainer[name]["losses"] for trainer in trained], axis=0)
    np.testing.assert_allclose(mean, expected["losses"], rtol=2e-6)
    tested = np.mean([trainer[name]["tested"] for trainer in trained])
    np.testing.assert_allclose(tested, expected["tested"], rtol=2e-6)
    assert trained[0][name]["values"] == trained[1][name]["values"]
    for parameter, value in trained[0][name]["values"].items():
        np.testing.assert_allclose(value, expected["values"][parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["word2vec", "ctr", "distributed_ctr", "simnet_bow"])
def test_a_table_is_not_on_trainers(name: str, trained: list[dict[str, Any]]) -> None:
    tables = {"emb", "emb_b", "emb_w", "SparseFeatFactors", "__emb__"}
    assert not tables & trained[0][name]["values"].keys()


@pytest.mark.parametrize("name", ["word2vec_copied", "ctr_copied", "async_word2vec_copied"])
def test_a_trainer_has_a_copy_of_a_table_whose_rows_it_does_not_fetch(
    name: str, trained: list[dict[str, Any]]
) -> None:
    tables = {"emb", "SparseFeatFactors"}
    assert tables & trained[0][name]["values"].keys()


@pytest.mark.parametrize("name", APART)
def test_trainers_that_equal_no_single_process_train(name: str, trained: list[dict[str, Any]]) -> None:
    for trainer in trained:
        losses, tested = trainer[name]["losses"], trainer[name]["tested"]
        assert np.isfinite([*losses, tested]).all()
        assert len(losses) == fluid_jobs.STEPS
        assert tested != losses[0], "the loss on the first samples changes by training"


@pytest.mark.parametrize("name", ["async_mlp_clipped", "async_mlp_by_norm", "geo_mlp_clipped"])
def test_a_trainer_clips_its_own_gradients_where_they_are_not_averaged(
    name: str, trained: list[dict[str, Any]]
) -> None:
    assert max(trained[0]["async_mlp"]["norms"]) > 2 * fluid_jobs.LIMIT
    for trainer in trained:
        assert 0 < max(trainer[name]["norms"]) < fluid_jobs.LIMIT * 1.001
