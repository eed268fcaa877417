"""What a GPU job finds in the trainer's image beside Python, tried in a pod of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tests.e2e.conftest import NewNamespace

SECONDS = 240.0
SCRIPT = """
import ctypes, torch
torch.save({}, "model.pt")
for library in ("libibverbs.so.1", "librdmacm.so.1"):
    ctypes.CDLL(library)
print("compiled", torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist())
"""


def test_a_pod_compiles_saves_and_loads_the_libraries_of_rdma(new_namespace: NewNamespace):
    job: dict[str, Any] = yaml.safe_load(Path("examples/collective/fleetjob.yaml").read_text())
    job["metadata"]["name"] = "compiles"
    job["spec"]["trainer"] |= {"replicas": 1}
    job["spec"]["failurePolicy"] = {"action": "FailJob"}
    job["spec"]["runPolicy"] = {"cleanPodPolicy": "None"}
    job["spec"]["template"]["spec"]["containers"][0]["command"] = ["python", "-c", SCRIPT]
    with new_namespace("image") as namespace:
        namespace("apply", "-f", "-", stdin=json.dumps(job))
        ended = namespace.wait_until(
            "fleetjobs",
            "compiles",
            lambda job: job.get("status", {}).get("state") in ("Succeeded", "Failed"),
            timeout=SECONDS,
            what="to succeed or fail",
        )
        log = namespace("logs", "compiles-trainer-0")
        assert ended["status"]["state"] == "Succeeded", log
        assert "compiled [1.0, 1.0, 1.0]" in log
