"""``fleetjob run --tensorboard``, as TensorBoard itself reads what it leaves."""

from __future__ import annotations

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.local import LocalRun, job_manifest
from tests.support.processes import wait_for

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]


def test_scalars_are_there_for_tensorboard_while_the_job_runs(tmp_path):
    # One that serves its progress, and says its last words when it finds `go`.
    script = """
import http.server, json, os, pathlib, threading, time
state = {"step": 1, "loss": 1.0, "samplesPerSecond": 9.0, "history": [[1, 1.0]]}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(state).encode())
address = (os.environ["PADDLE_CURRENT_IP"], int(os.environ["FLEET_METRICS_PORT"]))
server = http.server.ThreadingHTTPServer(address, Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
last = {"step": 3, "loss": 0.5, "metrics": {"accuracy": 0.75}, "history": [[1, 1.0], [3, 0.5]]}
open(os.environ["FLEET_TERMINATION_LOG"], "w").write(json.dumps(last))
"""
    board = tmp_path / "board"
    folder = board / "logs" / "trainer-0"  # named like the folder of the logs

    def scalars() -> dict[str, list[tuple[int, float]]]:
        if not folder.exists():
            return {}
        events = EventAccumulator(str(folder)).Reload()
        tags = events.Tags()["scalars"]
        return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}

    job = job_manifest(script, server=None)
    with LocalRun(tmp_path / "run", job, options=("-o", "json", "--tensorboard", str(board))) as run:
        wait_for(lambda: scalars().get("samples_per_second"), "the first scalars", seconds=30)
        (run.folder / "go").touch()
        assert run.wait() == 0, run.stderr
        assert f"scalars for TensorBoard: {board / 'logs'}" in run.stderr
        assert scalars() == {
            "loss": [(1, 1.0), (3, 0.5)],
            "samples_per_second": [(1, 9.0), (3, 9.0)],
            "accuracy": [(3, 0.75)],
        }
