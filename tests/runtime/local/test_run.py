"""``fleetjob run`` with tiny scripts: what a job does here is what it would do in a cluster."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
import uuid
from pathlib import Path

import pytest
import yaml

from tests.support.local import (
    DONE,
    GRANDCHILDREN,
    MARK,
    SERVER,
    LocalRun,
    job_manifest,
    survivors,
)
from tests.support.processes import parent, wait_for

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]

SLEEP = "import time; print('up', flush=True); time.sleep(300)"
# Fails or sleeps in its first life, which is killed, and ends the job in its second.
SECOND_LIFE_ENDS = """
import os, pathlib, time
if os.environ["FLEET_RESTARTS"] == "0":
    time.sleep(300)
pathlib.Path("done").touch()
"""


@pytest.mark.parametrize("gone", [False, True], ids=["a-full-disk", "a-reader-that-has-gone"])
def test_lines_that_nobody_takes_end_no_run(tmp_path, gone):
    """Only the object on standard output is left to tell how the job has ended."""
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job_manifest("import time; time.sleep(0.5)", server=None)))
    reading, writing = os.pipe()
    os.close(reading)
    stderr = writing if gone else os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "fleet_operator", "run", "-f", str(manifest), "-o", "json"]
    try:
        ended = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=False
        )
    finally:
        os.close(writing)
        if not gone:
            os.close(stderr)
    assert json.loads(ended.stdout)["state"] == "Succeeded"
    assert ended.returncode == 0


def test_a_job_succeeds(tmp_path):
    report = (
        "import json, os, pathlib; keys = ('PADDLE_TRAINER_ID', 'PADDLE_PSERVERS_IP_PORT_LIST', 'POD_IP', "
        "'CUDA_VISIBLE_DEVICES');"
    )
    report += "print(json.dumps({key: os.environ[key] for key in keys}), os.getcwd());" + DONE
    manifest = job_manifest(report, trainers=2, servers=2)
    manifest["spec"]["trainer"]["devices"] = {"count": 2}
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,4,GPU-5"}  # as if there were so many
    with LocalRun(tmp_path / "run", manifest, environ=gpus) as run:
        assert run.wait() == 0, run.stderr
        assert run.result() == {
            "state": "Succeeded",
            "reason": "TrainersCompleted",
            "message": run.result()["message"],
            "wall_seconds": pytest.approx(run.result()["wall_seconds"]),
            "replicas": [
                {"role": role, "index": index, "state": "Succeeded", "exit_codes": [0], "restarts": 0}
                | {"log": str(run.logs / f"{role}-{index}.log")}
                for role in ("pserver", "trainer")
                for index in (0, 1)
            ],
            "metrics": {},
            "logs": str(run.logs),
        }
        hosts = set()
        for index in (0, 1):
            header, line = run.log(f"trainer-{index}").splitlines()
            assert header.startswith(f"=== trainer-{index} of tiny, attempt 0.0, ")
            env = json.JSONDecoder().raw_decode(line)[0]
            assert env["PADDLE_TRAINER_ID"] == str(index)
            assert env["CUDA_VISIBLE_DEVICES"] == ("4,GPU-5" if index else "0,1")
            assert line.endswith(str(run.folder))
            servers = env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
            hosts |= {env["POD_IP"], *(server.removesuffix(":6174") for server in servers)}
        assert len(hosts) == 4
        assert all(host.startswith("127.") for host in hosts)


def test_all_replicas_of_a_run_share_one_key_and_so_does_one_that_is_replaced(tmp_path):
    writes = """
import os, pathlib, sys, time
restarts = os.environ["FLEET_RESTARTS"]
key = os.environ["FLEET_JOB_KEY"]
pathlib.Path(f"key-{os.environ['PADDLE_TRAINER_ID']}-{restarts}").write_text(key)
for line in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        if key in line.read_bytes().decode(errors="replace"):
            pathlib.Path("listed").write_text(str(line))
    except OSError:
        pass
while restarts == "0" and not pathlib.Path("key-0-1").exists():
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        sys.exit(3)
    time.sleep(0.1)
"""
    writes += DONE
    environ = {**os.environ, "FLEET_JOB_KEY": "aa" * 32}  # of the shell around it: no replica gets it
    with LocalRun(tmp_path / "run", job_manifest(writes, trainers=2), environ=environ) as run:
        assert run.wait() == 0, run.stderr
        [key] = {(run.folder / name).read_text() for name in ("key-0-0", "key-0-1", "key-1-0")}
        assert len(bytes.fromhex(key)) == 32
        assert key != environ["FLEET_JOB_KEY"]
        told = run.stdout + run.stderr + "".join(map(run.log, ("trainer-0", "trainer-1")))
        assert key not in told
        assert key not in json.dumps(run.result())
        assert not (run.folder / "listed").exists(), "a list of processes shows it"


@pytest.mark.parametrize(
    ("server", "environ", "expected"),
    [
        (SERVER, {}, "glibc.cpu.x86_non_temporal_threshold=2097152"),
        (SERVER, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0"),
        (None, {}, "None"),
    ],
)
def test_processes_that_share_memory_copy_past_the_caches_unless_the_user_says_otherwise(
    tmp_path, server, environ, expected
):
    job = job_manifest("import os; print(os.environ.get('GLIBC_TUNABLES'));" + DONE, server=server)
    with LocalRun(tmp_path / "run", job, environ=environ) as run:
        assert run.wait() == 0, run.stderr
        assert run.log("trainer-0").splitlines()[1] == expected


def test_trainers_wait_for_their_servers_where_the_manifest_says_so(tmp_path):
    listen = "socket.create_server((os.environ['POD_IP'], 6174))"
    slow = f"import socket, os, time; time.sleep(0.7); s = {listen}; time.sleep(1)"
    job = job_manifest("pass", server=slow, startupPolicy={"order": "InOrder"})
    with LocalRun(tmp_path / "run", job) as run:
        run.wait()
        said = [line.split(" s  ")[1] for line in run.stderr.splitlines() if " s  " in line]
        expected = ("pserver-0 has started", "pserver-0 is ready", "trainer-0 has started")
        moments = [next(i for i, line in enumerate(said) if line.startswith(text)) for text in expected]
        assert moments == sorted(moments), run.stderr


def test_trainers_that_all_fail_once_at_the_same_time_are_one_failure(tmp_path):
    fails_once = """
import os, pathlib, sys, time
me = os.environ["PADDLE_TRAINER_ID"]
if os.environ["FLEET_RESTARTS"] == "0":
    pathlib.Path("up-" + me).touch()
    while len(list(pathlib.Path().glob("up-*"))) < 8:
        time.sleep(0.02)
    sys.exit(1)
"""
    with LocalRun(tmp_path / "run", job_manifest(fails_once + DONE, trainers=8)) as run:
        assert run.wait() == 0, run.stderr
        result = run.result()
        assert result["state"] == "Succeeded"
        trainers = [each for each in result["replicas"] if each["role"] == "trainer"]
        assert [each["exit_codes"] for each in trainers] == [[1, 0]] * 8
        assert "(1 of 6)" in run.stderr
        assert "(2 of 6)" not in run.stderr


def test_a_failure_restarts_the_replica_up_to_the_limit_and_is_named(tmp_path):
    with LocalRun(
        tmp_path / "run", job_manifest("raise SystemExit('no data at /mnt')", runPolicy={"backoffLimit": 1})
    ) as run:
        assert run.wait() == 1, run.stderr
        assert "trainer-0 failed with exit code 1: no data at /mnt; restarting (1 of 1)" in run.stderr
        assert "trainer-0 failed with exit code 1: no data at /mnt; the job fails" in run.stderr
        result = run.result()
        assert (result["state"], result["reason"]) == ("Failed", "BackoffLimitExceeded")
        assert "trainer-0 failed with exit code 1: no data at /mnt" in result["message"]
        assert "no data at /mnt" in Path(result["replicas"][1]["log"]).read_text()
        # The server had nothing more to serve: cleanPodPolicy Running stopped it.
        assert [replica["exit_codes"] for replica in result["replicas"]] == [[143], [1, 1]]
        assert [replica["restarts"] for replica in result["replicas"]] == [0, 1]
        assert run.log("trainer-0").count("=== trainer-0 of tiny, attempt") == 2
        assert "attempt 0.1" in run.log("trainer-0")


def test_an_exception_that_comes_again_at_its_line_ends_the_run_and_is_shown(tmp_path):
    script = "def main():\n    columns = {}\n    return columns['age']\n\nmain()\n"
    with LocalRun(tmp_path / "run", job_manifest(script, server=None, trainers=2)) as run:
        assert run.wait() == 1, run.stderr
        assert max(len(each["exit_codes"]) for each in run.result()["replicas"]) == 2, "of seven"
        ended = run.stderr[run.stderr.index("tiny: Failed") :]
    assert "exit code 1: KeyError: 'age' (at " in ended
    assert "the same exception at the same line ended an earlier attempt of this run" in ended
    [who] = re.findall(r"the last lines of (trainer-\d), from (.*):\n", ended)
    assert who[1] == str(run.logs / f"{who[0]}.log")
    assert "    Traceback (most recent call last):\n" in ended
    assert "    KeyError: 'age'\n" in ended


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        pytest.param("RestartReplica", "restarting (1 of 6)", id="restart-replica"),
        pytest.param("RestartJob", "restarting the whole job (1 of 6)", id="restart-job"),
    ],
)
@pytest.mark.serial
def test_a_killed_trainer_is_named_at_once_and_restarted(tmp_path, policy, said):
    job = job_manifest(SECOND_LIFE_ENDS, failurePolicy={"action": policy})
    with LocalRun(tmp_path / "run", job) as run:
        run.kill("trainer-0")
        killed_at = time.monotonic()
        line = run.says("trainer-0 was ended by SIGKILL (exit code 137)")
        assert time.monotonic() - killed_at < 5
        assert said in line
        assert run.wait() == 0, run.stderr
        result = run.result()
        assert result["state"] == "Succeeded"
        trainer = result["replicas"][1]
        assert (trainer["state"], trainer["exit_codes"], trainer["restarts"]) == ("Succeeded", [137, 0], 1)
        server = result["replicas"][0]
        assert server["restarts"] == (1 if policy == "RestartJob" else 0)


@pytest.mark.serial
def test_a_killed_server_is_named_at_once_and_fails_the_job_where_the_policy_says_so(tmp_path):
    job = job_manifest(SLEEP, failurePolicy={"action": "FailJob"})
    with LocalRun(tmp_path / "run", job) as run:
        run.pid("trainer-0")
        run.kill("pserver-0")
        killed_at = time.monotonic()
        assert "the job fails" in run.says("pserver-0 was ended by SIGKILL (exit code 137)")
        assert time.monotonic() - killed_at < 5
        assert run.wait() == 1
        assert [each["exit_codes"] for each in run.result()["replicas"]] == [[137], [143]]


def test_a_script_runs_beside_its_manifest_and_where_its_template_says(tmp_path):
    jobs, own = tmp_path / "run" / "jobs", tmp_path / "own"
    for folder in (jobs, own):
        folder.mkdir(parents=True)
        (folder / "script.py").write_text("import os; print(os.getcwd())")
    job = job_manifest("")
    for role in ("pserver", "trainer"):
        [container] = job["spec"][role]["template"]["spec"]["containers"]
        container["command"] = ["python", "script.py"]
    container["workingDir"] = str(own)
    (jobs / "fleetjob.yaml").write_text(yaml.safe_dump(job))
    with LocalRun(tmp_path / "run", jobs / "fleetjob.yaml") as run:
        assert run.wait() == 0, run.stderr
        assert f"working directories: {jobs} (pserver), {own} (trainer)" in run.stderr
        assert run.log("pserver-0").splitlines()[1] == str(jobs)
        assert run.log("trainer-0").splitlines()[1] == str(own)
        assert "workingDir" not in run.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        pytest.param(
            ["no-such-program"],
            128,
            "could not run (StartError): cannot start 'no-such-program': No such file or directory",
            id="a-program-that-does-not-exist",
        ),
        pytest.param(
            ["sh", "-c", "cd / && exec no-such-program"],
            127,
            "failed with exit code 127: sh: 1: exec: no-such-program: not found",
            id="a-program-that-a-shell-does-not-find",
        ),
        pytest.param(
            ["python", "-m", "no_such_module"], 1, "No module named no_such_module", id="a-module-not-found"
        ),
        pytest.param(["python", "mistyped.py"], 1, "SyntaxError: invalid syntax", id="a-script-not-parsed"),
        pytest.param(
            ["python", "-c", "import transformrs"],
            1,
            "failed with exit code 1: ModuleNotFoundError: No module named 'transformrs'",
            id="an-import-not-found",
        ),
        pytest.param(
            ["python", "-c", "from json import lodas"], 1, "ImportError: cannot import", id="a-name-not-found"
        ),
        pytest.param(
            ["python", "-c", "input('Overwrite? [y/n] ')"],
            1,
            "failed with exit code 1: EOFError: EOF when reading a line",
            id="a-script-that-asks-a-person",
        ),
        pytest.param(
            ["torchrun", "--nproc-per-node=1", "--master-port=0", "imports.py"],
            1,
            "ModuleNotFoundError: No module named 'transformrs'",
            id="under-torchrun",
        ),
        pytest.param(
            ["python", "-m", "fleet.launch", "imports.py"],
            1,
            "failed with exit status 1: ModuleNotFoundError: No module named 'transformrs'",
            id="under-a-launcher-of-fleet",
        ),
    ],
)
def test_a_script_that_cannot_run_fails_the_job_at_once(tmp_path, command, code, said):
    job = job_manifest("pass", server=None)
    job["spec"]["trainer"]["template"]["spec"]["containers"][0]["command"] = command
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mistyped.py").write_text("for x in [1, 2] print(x)\n")
    (tmp_path / "run" / "imports.py").write_text("import transformrs\n")
    with LocalRun(tmp_path / "run", job) as run:
        assert run.wait() == 1, run.stderr
        assert said in run.stderr
        assert (
            "a retry would fail again; correct the script, its command or its image"
            in run.stdout + run.stderr
        )
        assert run.result()["replicas"][0]["exit_codes"] == [code]


def test_the_end_of_the_log_tells_more_of_a_failure_than_the_progress_before_it(tmp_path):
    body = "import os, pathlib, sys\nleft = pathlib.Path(os.environ['FLEET_TERMINATION_LOG'])\n"
    body += 'left.write_text(\'{"role":"TRAINER","index":0,"step":3}\')\n'
    body += "sys.exit('the validation set is empty')"
    job = job_manifest(body, server=None, failurePolicy={"action": "FailJob"})
    with LocalRun(tmp_path / "run", job) as run:
        assert run.wait() == 1, run.stderr
        assert "trainer-0 failed with exit code 1: the validation set is empty" in run.stderr


def test_a_name_server_that_hiccups_twice_fails_no_job(tmp_path):
    hiccup = "import os, socket\nif int(os.environ['FLEET_RESTARTS']) < 2: "
    hiccup += "raise socket.gaierror(-3, 'Temporary failure in name resolution')"
    with LocalRun(tmp_path / "run", job_manifest(hiccup, server=None)) as run:
        assert run.wait() == 0, run.stderr
        assert run.result()["replicas"][0]["exit_codes"] == [1, 1, 0]


def test_without_restarts_the_first_failure_fails_the_job(tmp_path):
    job = job_manifest("raise SystemExit('no data at /mnt')")
    with LocalRun(tmp_path / "run", job, options=("-o", "json", "--no-restart")) as run:
        assert run.wait() == 1, run.stderr
        assert "trainer-0 failed with exit code 1: no data at /mnt; the job fails" in run.stderr
        assert [each["exit_codes"] for each in run.result()["replicas"]] == [[143], [1]]
        assert [each["state"] for each in run.result()["replicas"]] == ["Stopped", "Failed"]


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_a_signal_stops_every_replica(tmp_path, signum, status):
    with LocalRun(tmp_path / "run", job_manifest(SLEEP, trainers=2)) as run:
        run.pid("trainer-1")
        run.process.send_signal(signum)
        assert run.wait(60) == status, run.stderr
        assert survivors(run.mark) == []
        result = run.result()
        assert [(each["state"], each["exit_codes"]) for each in result["replicas"]] == 3 * [
            ("Stopped", [143])
        ]
        assert (result["state"], result["reason"]) == ("Stopped", signum.name)
        assert "tiny: Stopped, " in run.stderr
        assert "Failed" not in run.stderr


def test_a_second_signal_kills_what_ignores_the_first(tmp_path):
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN);" + SLEEP
    job = job_manifest(stubborn)
    for role in ("pserver", "trainer"):
        job["spec"][role]["template"]["spec"]["terminationGracePeriodSeconds"] = 600
    with LocalRun(tmp_path / "run", job) as run:
        run.pid("trainer-0")
        wait_for(lambda: "up" in run.log("trainer-0"), "it ignores SIGTERM")
        run.process.send_signal(signal.SIGINT)
        run.says("SIGINT: stopping all replicas")
        time.sleep(0.2)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130  # long before the grace ends
        assert survivors(run.mark) == []
        assert run.result()["replicas"][1]["exit_codes"] == [137]


def test_a_run_that_takes_too_long_is_stopped(tmp_path):
    with LocalRun(tmp_path / "run", job_manifest(SLEEP), options=("-o", "json", "--timeout", "1")) as run:
        assert run.wait(60) == 124
        assert "not finished within 1 s" in run.stderr
        assert (run.result()["state"], run.result()["reason"]) == ("Stopped", "Timeout")


def test_the_death_of_the_supervisor_ends_the_run(tmp_path):
    with LocalRun(tmp_path / "run", job_manifest(SLEEP)) as run:
        supervisor = parent(parent(run.pid("trainer-0")))
        assert parent(supervisor) == run.process.pid
        os.kill(supervisor, signal.SIGKILL)
        assert run.wait(60) == 1
        assert "the supervisor process of this run was killed" in run.stderr
        assert (run.result()["state"], run.result()["reason"]) == ("Failed", "RunFailed")
        assert survivors(run.mark) == []


def test_two_runs_at_once_do_not_meet(tmp_path):
    job = job_manifest(DONE + "; import time; time.sleep(1)")
    with LocalRun(tmp_path / "one", job) as one, LocalRun(tmp_path / "two", job) as two:
        assert (one.wait(), two.wait()) == (0, 0), one.stderr + two.stderr


def test_two_collective_runs_at_once_use_two_ports(tmp_path):
    listen = (
        "import os, pathlib, socket, time; s = socket.create_server(('', int(os.environ['MASTER_PORT'])));"
    )
    meet = "pathlib.Path('up').touch()\nwhile not pathlib.Path('../one/go').exists(): time.sleep(0.02)"
    job = job_manifest(f"{listen} {meet}", server=None)
    with LocalRun(tmp_path / "one", job) as one, LocalRun(tmp_path / "two", job) as two:
        for run in (one, two):
            wait_for((run.folder / "up").exists, "both listen at the same time")
        (one.folder / "go").touch()
        assert (one.wait(), two.wait()) == (0, 0), one.stderr + two.stderr
        said = one.stderr + two.stderr
        assert said.count("port 6175 is in use on this machine: the trainers use ") >= 1


def test_progress_becomes_metrics_and_a_picture(tmp_path):
    words = {"step": 2, "loss": 0.5, "metrics": {"test_accuracy": 0.97}, "history": [[1, 1.0], [2, 0.5]]}
    trainer = f"import json, os; open(os.environ['FLEET_TERMINATION_LOG'], 'w').write(json.dumps({words!r}));"
    with LocalRun(tmp_path / "run", job_manifest(trainer + DONE)) as run:
        assert run.wait() == 0, run.stderr
        assert run.result()["metrics"] == {"test_accuracy": 0.97}
        assert (run.logs / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_progress_is_shown_while_a_replica_runs(tmp_path):
    serve = """
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"step": 7, "totalSteps": 9, "loss": 0.25, "history": []}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
address = (os.environ["PADDLE_CURRENT_IP"], int(os.environ["FLEET_METRICS_PORT"]))
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""
    with LocalRun(tmp_path / "run", job_manifest(serve)) as run:
        run.says("trainer-0 step 7/9, loss 0.25", 30)


JOINS = """
import os, pathlib, time
import torch
from fleet.parameter_server import fleet

fleet.init()
while fleet.is_server() and not pathlib.Path("go").exists():
    time.sleep(0.02)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    print("joined", flush=True)
    while not pathlib.Path("end").exists():
        time.sleep(0.02)
    fleet.stop_worker()
"""


def test_a_trainer_says_for_whom_it_waits_and_a_server_what_it_holds(tmp_path):
    with LocalRun(tmp_path / "run", job_manifest(JOINS, server=JOINS)) as run:
        host = run.says("pserver-0 has started").rpartition("address ")[2]
        run.says(f"trainer-0: waiting for parameter server {host}:6174 to listen", 80)
        (run.folder / "go").touch()
        wait_for(lambda: "joined" in run.log("trainer-0"), "the trainer joins")
        with urllib.request.urlopen(f"http://{host}:6180/progress", timeout=10) as answer:
            told = json.load(answer)
        assert (told["parameterBytes"], told["waitsFor"]) == (20, None)
        assert told["memoryBytes"] > 10 << 20
        (run.folder / "end").touch()
        assert run.wait() == 0, run.stderr


def test_trainer_zero_is_followed_through_its_lives_and_nobody_else(tmp_path):
    script = """
import os, pathlib, time
life, index = os.environ["FLEET_RESTARTS"], os.environ["PADDLE_TRAINER_ID"]
print(f"\\x1b[1mlife {life} of {index}\\x1b[0m", flush=True)
while index == "0" and not pathlib.Path(f"go{life}").exists():
    time.sleep(0.02)
if life + index == "00":
    raise SystemExit("over")
print(f"the end of {index}", end="")
if index == "0":
    pathlib.Path("done").touch()
"""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "trainer-0.log").write_text("an earlier run\n")
    job = job_manifest(script, trainers=2)
    with LocalRun(tmp_path / "run", job, options=("-o", "json", "--follow")) as run:
        for life in (0, 1):
            line = run.says(f"life {life} of 0")  # while it runs
            assert re.search(rf" s  \[trainer-0\] \d\d:\d\d:\d\d life {life} of 0$", line)
            (run.folder / f"go{life}").touch()
        assert run.wait() == 0, run.stderr
        assert re.search(r"\[trainer-0\] \d\d:\d\d:\d\d the end of 0$", run.stderr, re.MULTILINE)
        assert "] === trainer-0 of tiny, attempt 0.1" in run.stderr
        for other in ("an earlier run", "[trainer-1]", "listening"):
            assert other not in run.stderr


@pytest.mark.parametrize(
    ("policy", "code"),
    [pytest.param("None", 143, id="none-ends-with-the-run"), pytest.param("All", 143, id="all")],
)
def test_no_pod_outlives_the_run_whatever_is_left_in_a_cluster(tmp_path, policy, code):
    limits = {"backoffLimit": 0, "cleanPodPolicy": policy}
    with LocalRun(tmp_path / "run", job_manifest("raise SystemExit(1)", runPolicy=limits)) as run:
        assert run.wait() == 1, run.stderr
        assert [each["exit_codes"] for each in run.result()["replicas"]] == [[code], [1]]
        assert survivors(run.mark) == []


def test_a_finished_job_says_for_whom_it_waits(tmp_path):
    slow_end = SERVER.replace("done", "end")
    with LocalRun(tmp_path / "run", job_manifest(DONE, server=slow_end)) as run:
        run.says("waiting for pserver-0 to end")
        (run.folder / "end").touch()
        assert run.wait() == 0
        assert run.result()["replicas"][0]["exit_codes"] == [0]


def test_a_killed_runner_leaves_no_grandchild(tmp_path):
    with LocalRun(tmp_path / "run", job_manifest(GRANDCHILDREN, server=None)) as run:
        wait_for((run.folder / "spawned").exists, "the grandchildren")
        wait_for(lambda: len(survivors(run.mark)) > 5, "their children")
        run.process.kill()
        run.process.wait(60)
        wait_for(lambda: not survivors(run.mark), "the end of every process of the run")


def test_the_table_on_a_terminal_and_ctrl_c(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job_manifest(SLEEP)))
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 48, 0, 0))
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fleet_operator",
            "run",
            "-f",
            str(manifest),
            "--log-dir",
            str(tmp_path / "logs"),
        ],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        env={**os.environ, MARK: mark, "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # what makes Ctrl-C a SIGINT
    )
    os.close(terminal)
    shown = Screen(screen)
    try:
        shown.until(rb"tiny: Running")
        shown.until(rb"trainer-0 [^\n]*Starting")
        assert b"samples/s" in shown.text
        shown.until(rb"trainer-0: importing torch")
        os.write(screen, b"\x03")
        shown.until(rb"trainer-0 [^\n]*Stopped")
        shown.until(rb"tiny: Stopped, ")
        assert b"Failed" not in shown.text
        assert process.wait(60) == 130
        assert survivors(mark) == []
    finally:
        process.kill()
        process.wait(10)
        os.close(screen)


class Screen:
    """Reads what a terminal is sent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = b""

    def until(self, pattern: bytes, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            left = deadline - time.monotonic()
            assert left > 0, f"never shown: {pattern!r}\n{self.text.decode()}"
            if select.select([self._descriptor], [], [], left)[0]:
                self.text += os.read(self._descriptor, 65536)
