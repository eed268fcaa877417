"""A trainer that is killed between two gradients of a step comes back, and no bit of the training is another.

Real processes: blocks on one server have been stepped with what the trainer had sent, blocks on the other
still wait for it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kills import half_made
from tests.support.replicas import Job, Replica, job

SCRIPT = Path(__file__).parent / "scripts" / "kills.py"
STEPS = 10

pytestmark = pytest.mark.timeout(300)


def weights(replica: Replica) -> str:
    """Return the digest of what a trainer ends with."""
    (found,) = re.findall(r"^weights (\w+)$", replica.output, re.M)
    return str(found)


def environment(optimizer: str, *, clip: bool = False, **strategy: Any) -> dict[str, str]:
    """Return what makes the script train so."""
    return {"OPTIMIZER": optimizer, "STRATEGY": json.dumps(strategy)} | ({"CLIP": ""} if clip else {})


def train(running: Job, trainers: list[Replica], servers: list[Replica]) -> str:
    """Wait for the end; return what all trainers end with."""
    for replica in (*trainers, *servers):
        replica.expect(0, seconds=120)
    (digest,) = {weights(trainer) for trainer in trainers}
    return digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], str]:
    """Give a function that returns what a training ends with to which nothing happens."""
    known: dict[str, str] = {}

    def look(environ: dict[str, str]) -> str:
        name = repr(sorted(environ.items()))
        if name not in known:
            with job(
                tmp_path_factory.mktemp("undisturbed"), servers=2, trainers=2, rounds=1, **environ
            ) as running:
                servers, trainers = running.start(SCRIPT, str(STEPS))
                known[name] = train(running, trainers, servers)
        return known[name]

    return look


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(environment("adam", transport="tcp"), id="adam"),
        pytest.param(environment("adam", transport="shared_memory"), id="shared-memory"),
        pytest.param(environment("adam", wire_dtype="bfloat16"), id="bfloat16"),
        pytest.param(environment("momentum", transport="tcp", cross_step=True), id="cross-step"),
    ],
)
def test_a_trainer_killed_between_two_gradients_comes_back_to_values_of_one_step(
    environ, undisturbed, tmp_path
):
    expected = undisturbed(environ)
    with job(tmp_path, servers=2, trainers=2, rounds=1, **environ) as running:
        servers = [running.server(index, SCRIPT, str(STEPS)) for index in range(2)]
        survivor = running.trainer(0, SCRIPT, str(STEPS))
        victim = running.trainer(1, SCRIPT, str(STEPS), KILL_AT="5", KILL_ANSWERED="")
        assert victim.wait(120) == -9
        back = running.trainer(1, SCRIPT, str(STEPS), FLEET_RESTARTS="1")
        assert train(running, [survivor, back], servers) == expected
        assert "begins at step 5" in back.output
        assert half_made(servers) == 1  # else it would show nothing


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_trainer_killed_while_norms_are_awaited_comes_back_to_values_of_one_step(
    transport, undisturbed, tmp_path
):
    environ = environment("adam", clip=True, transport=transport)
    expected = undisturbed(environ)
    with job(tmp_path, servers=2, trainers=2, rounds=1, **environ) as running:
        servers = [running.server(index, SCRIPT, str(STEPS)) for index in range(2)]
        survivor = running.trainer(0, SCRIPT, str(STEPS))
        assert running.trainer(1, SCRIPT, str(STEPS), KILL_AT="5").wait(120) == -9
        back = running.trainer(1, SCRIPT, str(STEPS), FLEET_RESTARTS="1")
        assert train(running, [survivor, back], servers) == expected


def test_trainers_killed_at_once_and_again_while_they_rejoin_change_no_bit(undisturbed, tmp_path):
    environ = environment("adam", transport="tcp")
    expected = undisturbed(environ)
    with job(tmp_path, servers=2, trainers=2, rounds=1, **environ) as running:
        servers = [running.server(index, SCRIPT, str(STEPS)) for index in range(2)]
        first = running.trainer(1, SCRIPT, str(STEPS), KILL_AT="5", KILL_ANSWERED="")
        other = running.trainer(0, SCRIPT, str(STEPS))
        assert first.wait(120) == -9
        other.kill()
        for attempt in ("1", "2"):  # in the middle of the very step that it has come back to
            again = running.trainer(1, SCRIPT, str(STEPS), FLEET_RESTARTS=attempt, KILL_AT="5")
            assert again.wait(120) == -9
        back = [running.trainer(index, SCRIPT, str(STEPS), FLEET_RESTARTS="3") for index in range(2)]
        assert train(running, back, servers) == expected
        assert "begins at step 5" in back[1].output  # the other one may find that step made by now
