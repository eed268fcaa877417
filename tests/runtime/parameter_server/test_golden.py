"""Two servers and two trainers reach what the original reached, with every optimizer."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.replicas import job

GOLDEN = Path(__file__).parents[2] / "golden" / "train_sync.npz"
SCRIPT = Path(__file__).parent / "scripts" / "golden.py"
OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    directory = tmp_path_factory.mktemp("golden")
    with job(directory, servers=2, trainers=2, rounds=len(OPTIMIZERS)) as running:
        servers, trainers = running.start(SCRIPT, str(directory))
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=240)
    return [dict(np.load(directory / f"trainer-{index}.npz")) for index in range(2)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_parameters_are_those_of_the_original(trained, optimizer):
    golden = np.load(GOLDEN)
    rtol, atol = (1e-4, 1e-5) if optimizer == "adam" else (1e-5, 1e-7)
    for name in ("w0", "b0", "w1", "b1"):
        key = f"{optimizer}/{name}"
        for trainer in trained:
            np.testing.assert_allclose(trainer[key], golden[key], rtol=rtol, atol=atol, err_msg=key)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_losses_are_those_of_the_original(trained, optimizer):
    golden = np.load(GOLDEN)
    for index, trainer in enumerate(trained):
        np.testing.assert_allclose(
            trainer[f"{optimizer}/losses"],
            golden[f"{optimizer}/losses_trainer{index}"],
            rtol=1e-4 if optimizer == "adam" else 1e-5,
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_trainers_end_with_the_same_bits(trained, optimizer):
    for name in ("w0", "b0", "w1", "b1"):
        assert np.array_equal(trained[0][f"{optimizer}/{name}"], trained[1][f"{optimizer}/{name}"])
