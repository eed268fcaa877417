"""Both launchers with real processes: logs, exit statuses, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.processes import alive, free_ports, wait_for

SCRIPT = """
import os, pathlib, signal, subprocess, sys, time

env = os.environ.get
me = os.environ["TRAINING_ROLE"] + env("PADDLE_PSERVER_ID", "") + env("PADDLE_TRAINER_ID", "")
pids = pathlib.Path("pids")
here = pathlib.Path(".")


def note(pid):
    with pids.open("a") as file:
        file.write(f"{pid}\\n")


def spawn_family():
    note(os.getpid())
    note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    note(subprocess.Popen([sys.executable, "-c", stubborn]).pid)


def wait_for_all(count):
    while len(list(here.glob("ready-*"))) < count:
        time.sleep(0.01)
"""


TRAIN = """
import sys
import torch
from fleet.parameter_server import fleet

fleet.init()
model = torch.nn.Linear(4, 1)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    fleet.stop_worker()
print("torch._dynamo" in sys.modules)
"""
"""What each role of a small job does, and whether it has imported TorchDynamo then."""


SUPERVISE = """
import os, sys
from fleet.launch import supervisor

pids = []
supervisor.os.kill = lambda pid, number: pids.append(pid)
supervisor.os.killpg = lambda pid, number: None
supervisor.KILL_SECONDS = supervisor.SERVER_SECONDS = 0.2


def command(name, seconds, status):
    code = f"import sys, time; time.sleep({seconds}); sys.exit({status})"
    return supervisor.Command(name, name == "server 0", [sys.executable, "-c", code], os.environ)


status = supervisor.run([command("server 0", 600, 0), command("worker 0", 0, sys.argv[1])], None)
print(pids[0])
sys.exit(status)
"""
"""A server that no signal reaches, as none reaches a process in state D, and a worker that ends."""


LEAVE_BEHIND = """
import os, sys
from fleet.launch import supervisor

supervisor._children = lambda: None
code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
worker = supervisor.Command("worker 0", False, [sys.executable, "-c", code], os.environ)
sys.exit(supervisor.run([worker], None))
"""
"""A worker that ends before its child, under a launcher that is not told who its children are."""


class Launched:
    """A launcher on a script of its own, in a folder of its own."""

    def __init__(self, folder: Path, module: str, body: str, *flags: str) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT + textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *flags, "script.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, seconds: float = 30.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def pids(self, count: int) -> list[int]:
        def noted() -> list[int]:
            path = self.folder / "pids"
            lines = path.read_text().split() if path.exists() else []
            return [int(line) for line in lines] if len(lines) >= count else []

        return wait_for(noted, f"{count} process ids in {self.folder / 'pids'}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(module, body, *flags):
        started.append(Launched(tmp_path, module, body, *flags))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


def start_port() -> tuple[str, str]:
    return "--start_port", str(free_ports(2)[0])


def test_all_end_well_and_each_has_a_log(launch, tmp_path):
    status, out, _ = launch("fleet.launch_ps", "print('I am', me)", *start_port()).end()
    assert status == 0
    logs = {path.name: path.read_text().strip() for path in (tmp_path / "logs").iterdir()}
    assert logs == {
        "serverlog.0": "I am PSERVER0",
        "serverlog.1": "I am PSERVER1",
        "workerlog.0": "I am TRAINER0",
        "workerlog.1": "I am TRAINER1",
    }
    assert "worker 1" in out


@pytest.mark.parametrize("show", [True, False])
def test_workers_of_a_node_that_a_scheduler_has_described_are_listed_and_have_a_log_each(
    launch, tmp_path, monkeypatch, show
):
    port = start_port()[1]
    described = {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (described | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:{int(port) + 1}")
    body = "print('I am', me)\nprint('and complain', file=sys.stderr)"
    own = ["--use_paddlecloud", "--log_dir=logs", f"--print_config={show}"]
    status, out, err = launch("fleet.launch", body, *own).end()
    assert (status, err) == (0, "")
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"workerlog.{index}": f"I am TRAINER{index}\nand complain\n" for index in (0, 1)}
    listed = [f"worker {n}    127.0.0.1:{int(port) + n}  logs/workerlog.{n}" for n in (0, 1)]
    assert out.splitlines() == (listed if show else [])


def test_who_compiles_nothing_does_without_torch_dynamo(launch, tmp_path):
    launched = launch("fleet.launch_ps", TRAIN, *start_port(), "--server_num=1", "--worker_num=1")
    status, _, err = launched.end(90)
    assert (status, err) == (0, "")
    for log in ("serverlog.0", "workerlog.0"):
        assert (tmp_path / "logs" / log).read_text().endswith("False\n")


@pytest.mark.serial
def test_the_first_failure_stops_the_rest_with_all_their_children(launch):
    body = """
    spawn_family()
    (here / f"ready-{me}").touch()
    if me == "TRAINER1":
        wait_for_all(4)
        print("this is why")
        sys.exit(7)
    time.sleep(600)
    """
    launched = launch("fleet.launch_ps", body, *start_port())
    pids = launched.pids(12)
    began = time.monotonic()
    status, _, err = launched.end()
    assert status == 7
    assert time.monotonic() - began < 3 + 3
    assert "worker 1 failed with exit status 7" in err
    assert "this is why" in err
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.serial
def test_what_ignores_sigterm_is_killed_after_three_seconds(launch):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(os.getpid())
    (here / f"ready-{me}").touch()
    wait_for_all(2)
    if me == "TRAINER0":
        sys.exit(1)
    time.sleep(600)
    """
    launched = launch("fleet.launch_ps", body, *start_port(), "--server_num=1", "--worker_num=1")
    pids = launched.pids(2)
    began = time.monotonic()
    assert launched.end()[0] == 1
    assert 2.5 < time.monotonic() - began < 7
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_everything(launch, number):
    launched = launch("fleet.launch", "spawn_family()\ntime.sleep(600)", "--worker_num=2", *start_port())
    pids = launched.pids(6)
    launched.process.send_signal(number)
    status, _, err = launched.end()
    assert status == 128 + number
    assert number.name in err
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize(
    ("module", "flags"), [("fleet.launch", ["--worker_num=2"]), ("fleet.launch_ps", ["--server_num=1"])]
)
def test_a_process_has_its_children_until_the_end_of_its_grace(launch, tmp_path, module, flags):
    body = """
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def save(*_):
        answer, _ = child.communicate(b"saved", timeout=10)
        (here / f"answer-{me}").write_bytes(answer)
        note(subprocess.Popen(["sleep", "600"]).pid)
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    (here / f"ready-{me}").touch()
    while True:
        time.sleep(1)
    """
    launched = launch(module, body, *flags, *start_port())
    count = 2 if module == "fleet.launch" else 3
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == count, "all processes")
    launched.process.terminate()
    assert launched.end()[0] == 128 + signal.SIGTERM
    assert [path.read_text() for path in tmp_path.glob("answer-*")] == ["saved"] * count
    assert [pid for pid in launched.pids(count) if alive(pid)] == []


def test_a_worker_is_told_the_grace_that_the_launcher_gives_it(launch, tmp_path):
    body = """(here / "grace").write_text(os.environ["FLEET_GRACE_SECONDS"])"""
    launched = launch("fleet.launch", body, "--worker_num", "1", "--grace_seconds", "7", *start_port())
    assert launched.end()[0] == 0
    assert (tmp_path / "grace").read_text() == "7"


def test_what_an_ended_worker_has_left_is_killed_where_children_are_not_told():
    command = [sys.executable, "-c", LEAVE_BEHIND]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    wait_for(lambda: not alive(int(ended.stdout)), "the end of the child that was left behind")


def test_a_launcher_that_nohup_has_started_outlives_its_terminal(launch, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does: a new process inherits it
    try:
        body = """
        (here / "ready").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
        """
        launched = launch("fleet.launch", body, *start_port())
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for((tmp_path / "ready").exists, "the worker")
    launched.process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    status, _, err = launched.end()
    assert (status, err) == (0, "")


def test_a_second_signal_ends_the_grace_of_the_first(launch):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spawn_family()
    time.sleep(600)
    """
    launched = launch("fleet.launch", body, "--grace_seconds=60", *start_port())
    pids = launched.pids(3)
    for _ in range(2):
        launched.process.terminate()
        assert "SIGTERM" in launched.process.stderr.readline()
    status, _, _ = launched.end()
    assert status == 128 + signal.SIGTERM
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only there a launcher inherits what its processes leave")
def test_what_a_worker_leaves_behind_is_reaped_when_it_ends(launch):
    body = """
    note_and_end = "(pathlib.Path(f'ready-{os.getpid()}').touch(), time.sleep(0.2))"
    code = f"import os, pathlib, time; os.fork() or {note_and_end}"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True)
    wait_for_all(3)
    children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    deadline = time.monotonic() + 10
    while len(children.read_text().split()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    print(len(children.read_text().split()))
    """
    status, out, err = launch("fleet.launch", body, "--print_config=False", *start_port()).end()
    assert (status, out) == (0, "1\n"), err


def test_a_signal_ends_a_launcher_that_waits_for_the_first_nodes_address(launch, monkeypatch):
    first = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "1", "MASTER_ADDR": "no-such-host.invalid"}
    for name, value in (first | {"FLEET_HOST_NETWORK": "true"}).items():
        monkeypatch.setenv(name, value)
    launched = launch("fleet.launch", "sys.exit(9)")
    assert "waiting for the address of no-such-host.invalid" in launched.process.stderr.readline()
    launched.process.terminate()
    status, _, err = launched.end()
    assert (status, err) == (128 + signal.SIGTERM, "")


def test_workers_die_with_a_launcher_that_is_killed(launch):
    body = "note(os.getpid())\nwhile True:\n    time.sleep(1)"
    launched = launch("fleet.launch", body, "--worker_num=2", *start_port())
    pids = launched.pids(2)
    launched.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the workers' end")


def test_a_killed_worker_gives_its_signal_and_a_termination_message(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_TERMINATION_LOG", str(tmp_path / "words"))
    body = "note(os.getpid())\ntime.sleep(600)"
    launched = launch("fleet.launch", body, *start_port())
    os.kill(launched.pids(1)[0], signal.SIGKILL)
    assert launched.end()[0] == 137
    assert (tmp_path / "words").read_text() == "worker 0 was ended by signal 9\n"


def test_an_exit_status_that_no_signal_gives_is_told_with_the_last_line(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_TERMINATION_LOG", str(tmp_path / "words"))
    body = "print('no data', file=sys.stderr)\nsys.exit(-1)"
    assert launch("fleet.launch", body, *start_port()).end()[0] == 255
    assert (tmp_path / "words").read_text().endswith("worker 0 failed with exit status 255: no data\n")


@pytest.mark.parametrize("status", [0, 7])
def test_a_worker_may_remove_the_folder_of_its_log(launch, tmp_path, monkeypatch, status):
    monkeypatch.setenv("FLEET_TERMINATION_LOG", str(tmp_path / "words"))
    body = f"import shutil\nshutil.rmtree('logs')\nsys.exit({status})"
    assert launch("fleet.launch", body, "--log_dir=logs", *start_port()).end()[0] == status
    words = tmp_path / "words"
    assert not status or words.read_text() == "worker 0 failed with exit status 7\n"


@pytest.mark.parametrize("flags", [[], ["--log_dir=logs"]], ids=["one-output", "logs"])
def test_the_exception_of_the_worker_that_failed_is_the_launchers_last_word(
    launch, tmp_path, monkeypatch, flags
):
    monkeypatch.setenv("FLEET_TERMINATION_LOG", str(tmp_path / "words"))
    status, _, err = launch("fleet.launch", "import no_such_package", *flags, *start_port()).end()
    assert status == 1
    said = "ModuleNotFoundError: No module named 'no_such_package'"
    assert said in err
    words = (tmp_path / "words").read_text()
    assert words.startswith("Traceback (most recent call last):\n")
    assert words.endswith(f"\nworker 0 failed with exit status 1: {said}\n")


@pytest.mark.parametrize(("worker_status", "expected"), [(0, 1), (7, 7)])
def test_a_process_that_cannot_be_killed_is_named_and_not_waited_for(worker_status, expected):
    command = [sys.executable, "-c", SUPERVISE, str(worker_status)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == expected, ended.stderr
    pid = ended.stdout.strip()
    assert f"process {pid} (server 0) still runs 0.2 s after SIGKILL, in state S; in state D" in ended.stderr


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        ("fleet.launch_ps", ["--worker_num=none"], "--worker_num is 'none'; expected a whole number"),
        ("fleet.launch", ["--print_config=perhaps"], "--print_config is 'perhaps'; expected True or False"),
    ],
)
def test_bad_flags_end_before_anything_starts(launch, tmp_path, module, flags, message):
    status, _, err = launch(module, "raise SystemExit(9)", *flags).end()
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "logs").exists()


def test_a_missing_script_and_a_taken_port_are_named(launch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = launch("fleet.launch_ps", "", f"--endpoints=127.0.0.1:{port}").end()
    assert status == 2
    assert f"--endpoints: 127.0.0.1:{port} is in use by another process; choose another port" in err
    (tmp_path / "script.py").unlink()
    command = [sys.executable, "-m", "fleet.launch_ps", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert "training_script is 'script.py', which is not a file" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "source", "environ"),
    [
        pytest.param(
            [],
            "PET_MASTER_PORT",
            {"PET_NNODES": "1", "PET_NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "{}"},
            id="a-scheduler",
        ),
        pytest.param(["--start_port={}"], "--start_port", {}, id="a-flag"),
        pytest.param(
            ["--use_paddlecloud"],
            "PADDLE_PORT",
            {
                "PADDLE_TRAINERS": "127.0.0.1,127.0.0.2",
                "PADDLE_TRAINER_ID": "0",
                "POD_IP": "127.0.0.1",
                "PADDLE_PORT": "{}",
            },
            id="paddlecloud",
        ),
    ],
)
def test_a_taken_port_is_named_after_who_said_it(launch, monkeypatch, flags, source, environ):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in environ.items():
            monkeypatch.setenv(name, value.format(port))
        status, _, err = launch("fleet.launch", "", *[flag.format(port) for flag in flags]).end()
    expected = f"launch: {source}: 127.0.0.1:{port} is in use by another process; choose another port\n"
    assert (status, err) == (2, expected)


def test_programs_are_printed_by_each_server_and_the_first_worker_one_after_the_other(launch):
    body = """
    note(os.getpid())
    print("asked", os.environ["FLEET_PRINT_PROGRAM"], "of", me)
    sys.exit(0 if me != "TRAINER0" else 5)
    """
    flags = ["--print_program", "--server_num=2", "--worker_num=2", "--print_config=False", *start_port()]
    status, out, _ = launch("fleet.launch_ps", body, *flags).end()
    lines = [line for line in out.splitlines() if line]
    assert lines[0].startswith("// server 0 (127.0.0.1:")
    assert lines[2].startswith("// server 1 (127.0.0.1:")
    assert lines[1::2] == ["asked 1 of PSERVER0", "asked 1 of PSERVER1", "asked 1 of TRAINER0"]
    assert lines[4] == "// worker 0 (the others' differ in their trainer_id)"
    assert status == 5
