"""Tables in real processes: a trainer that is killed amid a step comes back, and no bit is another."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.replicas import Job, Replica, job

SCRIPT = Path(__file__).parent / "scripts" / "rows.py"
STEPS = 8

pytestmark = pytest.mark.timeout(300)


def rows_of(running: Job, trainers: list[Replica]) -> str:
    """Wait for the end; return the digest of the rows that all trainers end with."""
    for replica in (*trainers, *(each for each in running.replicas if each.name.startswith("pserver"))):
        replica.expect(0, seconds=120)
    (digest,) = {re.findall(r"^rows (\w+)$", trainer.output, re.M)[0] for trainer in trainers}
    return str(digest)


def test_servers_tell_of_their_tables_and_trainer_0_exports_the_rows_that_are_served(tmp_path):
    words = tmp_path / "words"
    with job(tmp_path, servers=2, trainers=1, rounds=2) as running:
        port = int(running.endpoints[-1].rpartition(":")[2]) + 1
        running.server(0, SCRIPT, str(STEPS), FLEET_METRICS_PORT=str(port))
        running.server(1, SCRIPT, str(STEPS), FLEET_TERMINATION_LOG=str(tmp_path / "other"))
        told = {
            "METRICS": f"127.0.0.1:{port}",
            "FLEET_TERMINATION_LOG": str(words),
            "EXPORT": str(tmp_path),
        }
        trainer = running.trainer(0, SCRIPT, str(STEPS), **told)
        rows_of(running, [trainer])
    metrics = dict(re.findall(r'^fleet_table_(\w+){table="rows"} (\S+)$', trainer.output, re.M))
    (other,) = json.loads((tmp_path / "other").read_text())["tables"]
    (total,) = json.loads(words.read_text())["tables"]
    found, looked_up = (
        float(metrics[f"ids_{what}_total"]) + other[key]
        for what, key in [("found", "found"), ("looked_up", "lookedUp")]
    )
    assert total == {
        "name": "rows",
        "rows": float(metrics["rows"]) + other["rows"],
        "bytes": float(metrics["bytes"]) + other["bytes"],
        "rowsOnDisk": 0,
        "hitPercentage": 100 * found // looked_up,
        "shardSkew": total["shardSkew"],
    }
    assert total["shardSkew"] >= other["rowsOfFullestShard"] * 256 / total["rows"] - 0.01
    assert 0 < float(metrics["ids_found_total"]) < float(metrics["ids_looked_up_total"])
    assert float(metrics["shard_skew"]) >= 1.0
    model, rows = load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "rows.pt")
    assert model["rows.ids"].tolist() == [3, 7, 199]
    assert torch.equal(model["rows.rows"], rows[[3, 7, 199]])
    assert set(model) == {"rows.ids", "rows.rows", "2.weight", "2.bias"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the rows of a training that nobody disturbs, and that asks for none ahead."""
    with job(tmp_path_factory.mktemp("undisturbed"), servers=2, trainers=2) as running:
        return rows_of(running, running.start(SCRIPT, str(STEPS))[1])


@pytest.mark.parametrize(
    ("environ", "kill"),
    [
        pytest.param({}, {}, id="amid-its-step"),
        pytest.param({"AHEAD": "1"}, {}, id="amid-its-step-with-rows-of-the-next-batch"),
        pytest.param({"AHEAD": "1"}, {"KILL_ASKED": "1"}, id="as-it-has-asked-for-rows-of-the-next-batch"),
    ],
)
def test_a_killed_trainer_comes_back_and_no_row_is_another(tmp_path, undisturbed, environ, kill):
    with job(tmp_path, 2, 2, 1, **environ) as running:
        for index in range(2):
            running.server(index, SCRIPT, str(STEPS))
        survivor = running.trainer(0, SCRIPT, str(STEPS))
        assert running.trainer(1, SCRIPT, str(STEPS), KILL_AT="5", **kill).wait(120) == -9
        back = running.trainer(1, SCRIPT, str(STEPS), FLEET_RESTARTS="1")
        assert rows_of(running, [survivor, back]) == undisturbed
        assert "begins at step 5" in back.output


def test_in_async_mode_a_trainer_that_is_killed_amid_a_prefetch_loses_and_repeats_no_step(tmp_path):
    script = SCRIPT.with_name("counted_rows.py")
    with job(tmp_path, servers=2, trainers=2) as running:
        servers = [running.server(index, script, str(STEPS)) for index in range(2)]
        survivor = running.trainer(0, script, str(STEPS))
        assert running.trainer(1, script, str(STEPS), KILL_AT="5").wait(120) == -9
        back = running.trainer(1, script, str(STEPS), FLEET_RESTARTS="1")
        back.expect(0, "\n0 counts are wrong", seconds=120)
        # What was sent last may not have come before the connection broke.
        assert re.search(r"^begins at step [45]$", back.output, re.M), back.output
        for replica in (survivor, *servers):
            replica.expect(0, seconds=60)
