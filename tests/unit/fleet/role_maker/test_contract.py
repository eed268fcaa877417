"""The environment contract, read from the side of the trainer: what the operator writes makes the role."""

from pathlib import Path

import pytest
import yaml

from fleet.errors import RoleError
from fleet.parameter_server.settings import Settings
from fleet.role_maker import PaddleCloudRoleMaker

FOLDER = Path(__file__).parents[4] / "contract" / "env"
CONTRACTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
REPLICAS = [
    pytest.param(contract["job"], replica, id=f"{name}-{replica['role']}-{replica['index']}")
    for name, contract in CONTRACTS.items()
    for replica in contract["replicas"]
]


def test_the_contract_covers_both_modes():
    assert {contract["job"]["spec"]["mode"] for contract in CONTRACTS.values()} == {
        "ParameterServer",
        "Collective",
    }
    assert len(CONTRACTS) >= 6


@pytest.mark.parametrize(("job", "replica"), REPLICAS)
def test_the_environment_makes_the_role(job, replica):
    spec, env = job["spec"], replica["env"]
    is_collective = spec["mode"] == "Collective"
    slots = spec["trainer"].get("nprocPerNode", 1) if is_collective else 1
    maker = PaddleCloudRoleMaker(is_collective=is_collective)
    if slots > 1:
        # Such a pod's command is a launcher, which gives each of its processes a rank.
        with pytest.raises(RoleError, match="PADDLE_TRAINER_ID or RANK is not set"):
            maker.generate_role(env)
        env = env | {"RANK": str(replica["index"] * slots)}
    role = maker.generate_role(env)

    assert role.is_server == (replica["role"] == "pserver")
    assert role.index == replica["index"] * slots
    assert role.worker_num == spec["trainer"]["replicas"] * slots
    assert role.server_num == (0 if is_collective else spec["pserver"]["replicas"])
    assert role.current_host == env["PADDLE_CURRENT_IP"]
    assert (role.job.name, role.job.uid) == (job["metadata"]["name"], job["metadata"]["uid"])
    assert role.job.key.hex() == env["FLEET_JOB_KEY"]
    assert (role.job.attempt, role.sync_mode) == (0, spec.get("syncMode", "Sync"))
    tls = spec.get("network", {}).get("tls", {})
    assert Settings.from_environ(env).tls_server_name == tls.get("serverName", "")
    assert bool(Settings.from_environ(env).tls_dir) is bool(tls)
    elastic = role.sync_mode in ("Async", "HalfAsync") and not is_collective
    assert Settings.from_environ(env).max_trainers == (
        spec["trainer"].get("maxReplicas") if elastic else None
    )
    if is_collective:
        assert role.worker_endpoints[role.index] == role.current_endpoint
    elif role.is_server:
        assert role.server_endpoints[role.index] == role.current_endpoint
