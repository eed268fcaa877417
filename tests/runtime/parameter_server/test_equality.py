"""A distributed run equals one process's mathematics to the bit, and two runs equal each other."""

from pathlib import Path

import pytest
import torch

from tests.runtime.parameter_server.scripts import mixture
from tests.support.replicas import job
from tests.support.threads import one_torch_thread

SCRIPT = Path(mixture.__file__)

Values = dict[str, torch.Tensor]


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Values]]:
    directory = tmp_path_factory.mktemp("mixture")
    with job(directory, servers=2, trainers=2, rounds=len(mixture.ROUNDS)) as running:
        servers = [
            running.server(index, SCRIPT, str(directory), SERVER_INDEX=str(index)) for index in range(2)
        ]
        trainers = [running.trainer(index, SCRIPT, str(directory)) for index in range(2)]
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=240)
    return {
        name: [torch.load(directory / f"{name}-{index}.pt") for index in range(2)] for name in mixture.ROUNDS
    }


@pytest.fixture(scope="module")
def alone() -> Values:
    with one_torch_thread():
        return mixture.in_one_process()


@pytest.mark.parametrize("name", mixture.ROUNDS)
def test_a_run_equals_one_process_to_the_bit(trained, alone, name):
    for values in trained[name]:
        assert [key for key in alone if not torch.equal(values[key], alone[key])] == []


def test_two_runs_equal_each_other_to_the_bit(trained):
    first, second = trained["overlap"][0], trained["again"][0]
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
