"""The reporters of ``FLEET_REPORTERS`` in jobs, as each tool's own package reads what they leave."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fleet.process import reporting
from tests.support.documents import block
from tests.support.forked_python import ForkedPython
from tests.support.frameworks import FRAMEWORKS, ForkedFrameworks
from tests.support.local import LocalRun, forked, job_manifest

SECONDS = 200

pytestmark = [
    pytest.mark.timeout(SECONDS + 50),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what a run leaves"),
]
installed = pytest.mark.skipif(
    not FRAMEWORKS.exists(), reason="`make .venv-frameworks/.installed` brings MLflow and wandb"
)

SCRIPT = """
from fleet.{facade} import fleet
import torch
fleet.init()
model = torch.nn.Linear(2, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.run_server()
    raise SystemExit
{start}
for step in (1, 2, 3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    fleet.report({{"accuracy": step / 4}}, step=step, loss=1 / step)
fleet.stop_worker()
"""
PARAMETER_SERVER = SCRIPT.format(facade="parameter_server", start="fleet.init_worker()")
COLLECTIVE = SCRIPT.format(facade="collective", start="")

PATIENT = """
from fleet.process import lifecycle
lifecycle.REPORT_SECONDS = 100  # MLflow and wandb take long to import on a busy machine
"""

EXPECTED = {"loss": [[1, 1.0], [2, 0.5], [3, 1 / 3]], "accuracy": [[1, 0.25], [2, 0.5], [3, 0.75]]}


def trained(
    folder: Path, script: str, server: str | None, program: type[ForkedPython], **environ: str
) -> LocalRun:
    """Run a job of two trainers to its end."""
    env = [{"name": name, "value": value} for name, value in environ.items()]
    job = forked(job_manifest(script, server=server, trainers=2, env=env), program)
    with LocalRun(folder, job) as run:
        assert run.wait(SECONDS) == 0, run.stderr + run.log("trainer-0")
    assert "reporter" not in run.log("trainer-0"), run.log("trainer-0")
    return run


def read_by(
    folder: Path, source: str, *arguments: str, **environ: str
) -> dict[str, dict[str, list[list[float]]]]:
    """Return what a script prints as JSON that uses the packages of other tools."""
    with (folder / "read").open("wb") as output, (folder / "errors").open("wb") as errors:
        program = ("-c", textwrap.dedent(source), *arguments)
        status = ForkedFrameworks(*program, env=environ, output=output, errors=errors).wait(SECONDS)
    assert status == 0, (folder / "errors").read_text()
    read: dict[str, dict[str, list[list[float]]]] = json.loads((folder / "read").read_text())
    return read


@pytest.mark.parametrize(
    ("script", "server"),
    [(PARAMETER_SERVER, PARAMETER_SERVER), (COLLECTIVE, None)],
    ids=["servers", "collective"],
)
def test_tensorboard_shows_what_each_trainer_reports(tmp_path, script, server):
    board = {"FLEET_REPORTERS": "tensorboard", "FLEET_TENSORBOARD_DIR": str(tmp_path / "board")}
    trained(tmp_path / "run", script, server, ForkedPython, **board)
    for replica in ("trainer-0", "trainer-1"):
        events = EventAccumulator(str(tmp_path / "board" / "tiny" / replica)).Reload()
        found = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in EXPECTED}
        for tag, points in EXPECTED.items():
            assert found[tag] == [(step, pytest.approx(value)) for step, value in points]


def test_the_pages_reporters_are_there():
    env = {
        each["name"]: each["value"]
        for each in yaml.safe_load(block("docs/watching.md", "Reporters", "yaml"))["env"]
    }
    assert env.keys() == {"FLEET_REPORTERS", "FLEET_TENSORBOARD_DIR", "MLFLOW_TRACKING_URI"}
    reporting.check(env)


@installed
def test_mlflow_and_wandb_have_a_run_of_each_trainer(tmp_path):
    store = f"file://{tmp_path / 'mlruns'}"
    environ = {
        "FLEET_REPORTERS": "mlflow, wandb",
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    trained(tmp_path / "run", PATIENT + COLLECTIVE, None, ForkedFrameworks, **environ)
    of_mlflow = """
    import json, sys
    from mlflow.tracking import MlflowClient
    client = MlflowClient(sys.argv[1])
    # A file store has no locks: each of two trainers that begin at once may make the experiment.
    experiments = client.search_experiments(filter_string="name = 'tiny'")
    runs = client.search_runs([each.experiment_id for each in experiments])
    assert all(run.info.status == "FINISHED" for run in runs)
    print(json.dumps({
        run.info.run_name: {
            name: [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        for run in runs
    }))
    """
    assert read_by(tmp_path, of_mlflow, store, HOME=str(tmp_path), MLFLOW_ALLOW_FILE_STORE="true") == {
        "trainer-0": EXPECTED,
        "trainer-1": EXPECTED,
    }
    # wandb itself reads its files in a program without a Python interface; they are logs of LevelDB's format.
    of_wandb = """
    import json, pathlib, struct, sys
    from wandb.proto.wandb_internal_pb2 import Record

    BLOCK, HEADER = 32768, struct.Struct("<IHB")

    def records(data):
        at, whole = 7, b""
        while at + HEADER.size <= len(data):
            if BLOCK - at % BLOCK < HEADER.size:
                at += BLOCK - at % BLOCK
                continue
            _, size, kind = HEADER.unpack_from(data, at)
            at += HEADER.size + size
            whole += data[at - size:at]
            if kind in (1, 4):  # the whole record, or its last part
                yield Record.FromString(whole)
                whole = b""

    found = {}
    for path in pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb"):
        name, values = None, {}
        for record in records(path.read_bytes()):
            if record.run.display_name:
                name = record.run.display_name
                assert record.run.run_group == "tiny"
            items = {each.key or each.nested_key[0]: each.value_json for each in record.history.item}
            for tag in ("loss", "accuracy"):
                if tag in items:
                    values.setdefault(tag, []).append([json.loads(items["step"]), json.loads(items[tag])])
        found[name] = values
    print(json.dumps(found))
    """
    assert read_by(tmp_path, of_wandb, str(tmp_path), HOME=str(tmp_path)) == {
        "trainer-0": EXPECTED,
        "trainer-1": EXPECTED,
    }
