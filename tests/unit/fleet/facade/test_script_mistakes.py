"""A mistake before a script's role is known ends it with one sentence and a status that fails its job."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.forked_python import ForkedPython

pytestmark = [
    pytest.mark.programs,
    pytest.mark.timeout(110),
    pytest.mark.skipif(sys.platform != "linux", reason="ForkedPython needs SOCK_SEQPACKET, as Linux has it"),
]

COLLECTIVE = {
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6175,10.0.0.2:6175",
    "WORLD_SIZE": "2",
    "NODE_RANK": "1",
}
SERVERS = {
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6174",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
}


def ended(folder: Path, script: str, environ: dict[str, str]) -> tuple[int, str, str]:
    """Run a script to its end; return its exit status, what it said, and its last words."""
    path, errors, words = folder / "script.py", folder / "errors", folder / "words"
    path.write_text(script)
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLEET_"))}
    env = told | environ | {"FLEET_TERMINATION_LOG": str(words)}
    with errors.open("w+") as said:
        code = ForkedPython(path, env=env, output=said, errors=said).wait(100)
    return code, errors.read_text(), words.read_text() if words.exists() else ""


@pytest.mark.parametrize(
    ("package", "call", "environ", "found"),
    [
        pytest.param(
            "collective",
            "init()",
            COLLECTIVE | {"NPROC_PER_NODE": "2"},
            "PADDLE_TRAINER_ID or RANK is not set, but NPROC_PER_NODE is '2'",
            id="slots-without-a-launcher",
        ),
        pytest.param(
            "parameter_server",
            "init()",
            COLLECTIVE,
            "PADDLE_PSERVERS_IP_PORT_LIST is not set, but PADDLE_TRAINER_ENDPOINTS is: this job has the "
            "mode Collective, without parameter servers; expected `from fleet.collective import fleet`",
            id="the-fleet-beside-servers-in-a-job-without",
        ),
        pytest.param(
            "collective",
            "init()",
            SERVERS,
            "PADDLE_TRAINER_ENDPOINTS is not set, but PADDLE_PSERVERS_IP_PORT_LIST is: this job has the "
            "mode ParameterServer; expected `from fleet.parameter_server import fleet`",
            id="the-fleet-without-servers-in-a-job-that-has-some",
        ),
        pytest.param(
            "collective",
            "distributed_optimizer(None)",
            COLLECTIVE,
            "distributed_optimizer: found NoneType",
            id="a-call-before-init",
        ),
        pytest.param(
            "parameter_server",
            "barrier_worker()",
            SERVERS,
            "fleet.init was not called",
            id="a-call-before-init-beside-servers",
        ),
    ],
)
def test_a_mistake_ends_a_script_by_one_sentence_and_the_status_that_fails_its_job(
    tmp_path, package, call, environ, found
):
    code, said, words = ended(tmp_path, f"from fleet.{package} import fleet\nfleet.{call}\n", environ)
    assert code == 2, said
    assert said.startswith(f"trainer 1: {found}")
    assert said.count("\n") == 1
    assert words.startswith(f"trainer 1 (not joined): {found}")


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("sys.ps1 = '>>> '  # what the interpreter sets", id="an-interactive-session"),
        pytest.param("os.fork() and (os.wait(), os._exit(0))", id="a-forked-child"),
    ],
)
def test_what_is_no_replica_keeps_its_traceback_and_leaves_no_last_words(tmp_path, where):
    script = f"import os, sys\nfrom fleet.collective import fleet\n{where}\nfleet.worker_num()\n"
    _, said, words = ended(tmp_path, script, COLLECTIVE)
    assert said.startswith("Traceback")
    assert words == ""
