"""How a replica ends: each case is a process of its own, because ending is what is tested."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.processes import free_ports

pytestmark = pytest.mark.programs

PRELUDE = """
import os, signal, sys, threading, time
from types import SimpleNamespace
from fleet import errors, report
from fleet.process import lifecycle, progress

def start(kind="WORKER"):
    lifecycle.start(SimpleNamespace(kind=SimpleNamespace(name=kind), index=1))

def ready():
    os.write(1, b"ready ")

MUTEX = bytes(64)  # in C, a mutex that nobody holds

def wait_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

"""


@pytest.fixture
def words(tmp_path):
    return tmp_path / "words"


@pytest.fixture
def replica(words):
    """Start a replica from a script; it is killed at the end of the test if it still lives."""
    started = []

    def start(body: str, **environ: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"FLEET_TERMINATION_LOG": str(words), "PYTHONUNBUFFERED": ""} | environ,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("error", "status"),
    [("PeerLostError", 91), ("StateLostError", 90), ("RemoteProtocolError", 1), ("RoleError", 2)],
)
def test_each_error_has_its_exit_status_and_one_sentence(replica, words, error, status):
    code, out, err = ended(replica(f"start(); print('before'); raise errors.{error}('a is 1;\\nexpected 2')"))
    assert (code, out) == (status, "before\n")
    assert err.splitlines()[-1] == "trainer 1: a is 1; expected 2"
    assert words.read_text() == "trainer 1 (not joined): a is 1; expected 2\n"
    assert ("Traceback" in err) is (error != "RoleError")


def test_an_unexpected_error_keeps_its_traceback(replica, words):
    code, _, err = ended(replica("start(); report(step=1); {}['missing']"))
    assert code == 1
    assert "Traceback" in err
    assert words.read_text().startswith("trainer 1 (not joined): KeyError: 'missing' (at ")


def test_a_replica_has_all_descriptors_that_it_may_have_and_keeps_some_for_saves(replica):
    body = """
    import resource
    from fleet.process.resources import for_saves
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    def count():
        return len(os.listdir("/proc/self/fd"))
    start()
    kept = count()
    with for_saves.lent(), for_saves.lent():
        lent = count()
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard), kept - lent, count() - lent)
    """
    assert ended(replica(body))[:2] == (0, "True 16 16\n")


def test_a_thread_that_dies_of_our_error_ends_the_replica(replica, words):
    body = """
    start()
    lifecycle.joined()
    def run():
        raise errors.PeerLostError("pserver 0 is gone")
    threading.Thread(target=run).start()
    wait_in_a_lock()
    """
    assert ended(replica(body))[0] == 91
    assert words.read_text() == "trainer 1 (joined, no step made): pserver 0 is gone\n"


@pytest.mark.parametrize(("name", "status"), [("fleet-sender", 1), ("the user's", 0)])
def test_a_runtime_thread_ends_the_replica_by_any_error_a_users_does_not(replica, name, status):
    body = f"""
    start()
    def run():
        raise KeyError("x")
    thread = threading.Thread(target=run, name={name!r})
    thread.start()
    thread.join()
    """
    code, _, err = ended(replica(body))
    assert code == status
    assert "KeyError" in err


def test_a_failed_replica_ends_though_a_thread_never_does(replica):
    body = """
    lifecycle.EXIT_SECONDS = 0.5
    start()
    threading.Thread(target=wait_in_a_lock).start()
    raise errors.PeerLostError("gone")
    """
    code, _, err = ended(replica(body))
    assert code == 91
    assert "threads were still running 0.5 s after the error" in err


WAITS = {
    "a-lock": "wait_in_a_lock()",
    "a-socket": "import socket; a, b = socket.socketpair(); a.recv(1)",
    "a-busy-loop": "while True: pass",
    "a-c-function": "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; lock(MUTEX); lock(MUTEX)",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
@pytest.mark.serial
def test_sigterm_ends_a_replica_within_two_seconds(replica, words, wait):
    process = replica(f"start()\nprint('buffered')\nready()\n{wait}")
    assert process.stdout.read(6) == "ready "
    time.sleep(0.2)  # until it waits: a signal before would find Python between two bytecodes
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out, _ = ended(process)
    assert time.monotonic() - began < 2
    assert (code, out) == (143, "buffered\n")
    assert words.read_text() == "trainer 1 was stopped by SIGTERM\n"


def test_what_torchrun_stops_says_nothing_before_torchrun_has_said_who_failed(replica, words):
    process = replica(
        "import os; os.environ['TORCHELASTIC_RUN_ID'] = 'job'; start(); ready()\nwait_in_a_lock()"
    )
    assert process.stdout.read(6) == "ready "
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert not words.exists()


def as_pid_1() -> bool:
    """Whether this machine lets us make a PID namespace."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not as_pid_1(), reason="needs the right to make a PID namespace")
@pytest.mark.serial
def test_sigterm_ends_a_replica_that_is_pid_1(words, tmp_path):
    body = "assert os.getpid() == 1\nstart()\nready()\nwait_in_a_lock()"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", PRELUDE + body]
    environ = os.environ | {"FLEET_TERMINATION_LOG": str(words)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(6) == "ready "
        replica_pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        began = time.monotonic()
        os.kill(replica_pid, signal.SIGTERM)
        process.communicate(timeout=20)
        assert time.monotonic() - began < 2
        assert process.returncode == 143
    finally:
        process.kill()
        process.communicate()


HANDLED_BEFORE = "signal.signal(signal.SIGTERM, handle)\nstart()"
HANDLED_AFTER = "start()\nsignal.signal(signal.SIGTERM, handle)"
TOLD = """
class Told:
    said = False
    def set(self):
        self.said = True
    def wait(self, seconds):
        while not self.said:
            time.sleep(0.01)
told = Told()
"""
SAVES = "told.wait(60)\ntime.sleep(1.5)\nos.write(1, b'saved')"


def scripts(handle: str, starts: str, loop: str) -> str:
    """Return a script with a handler of its own, which it sets before it begins or afterwards.

    A signal just before a sleep does not shorten it, so no sleep is long. An Event has a lock, for which a
    handler would wait for ever if it interrupts `Event.wait`.
    """
    parts = (TOLD, "def handle(*_):", textwrap.indent(textwrap.dedent(handle), "    "))
    short = loop.replace("time.sleep(60)", "for _ in range(600): time.sleep(0.1)")
    return "\n".join([*parts, starts, "ready()", textwrap.dedent(short)])


@pytest.mark.parametrize("starts", [HANDLED_BEFORE, HANDLED_AFTER], ids=["before", "after"])
@pytest.mark.parametrize(
    ("handle", "loop", "code"),
    [
        pytest.param("time.sleep(1.5)\nos.write(1, b'saved')\nos._exit(3)", "time.sleep(60)", 3, id="saves"),
        pytest.param("told.set()", SAVES, 143, id="the-loop-saves"),
        pytest.param("os.write(1, b'saved')\nsys.exit(42)", "time.sleep(60)", 42, id="with-a-status"),
        pytest.param("os.write(1, b'saved')\nraise ValueError", "time.sleep(60)", 1, id="by-an-exception"),
        pytest.param(
            "os.write(1, b'saved')\nsys.exit(1)",
            "try:\n    time.sleep(60)\nexcept SystemExit:\n    pass",
            1,
            id="with-a-failure-that-the-loop-catches",
        ),
        pytest.param(
            "os.write(1, b'saved')\nsys.exit(256)",
            "try:\n    time.sleep(60)\nexcept SystemExit:\n    pass",
            143,
            id="with-a-multiple-of-256-that-the-loop-catches",
        ),
        pytest.param("os.write(1, b'saved')\nraise SystemExit", "time.sleep(60)", 143, id="as-if-well"),
        pytest.param("signal.signal(15, signal.SIG_IGN)\ntold.set()", SAVES, 143, id="told-once"),
        pytest.param("signal.signal(15, signal.SIG_DFL)\ntold.set()", SAVES, 143, id="told-twice-at-most"),
        pytest.param(
            "assert lifecycle.refuses('a call')\nos.write(1, b'saved')\nraise SystemExit",
            "time.sleep(60)",
            143,
            id="it-asks-at-once",
        ),
        pytest.param(
            "told.set()",
            f"def refuse(_):\n    raise RuntimeError\n{SAVES}\nthreading.Thread.start = refuse",
            143,
            id="no-thread-at-the-end",
        ),
    ],
)
def test_a_script_that_handles_sigterm_saves_and_has_not_completed(
    replica, words, starts, handle, loop, code
):
    process = replica(scripts(handle, starts, loop))
    assert process.stdout.read(6) == "ready "
    process.send_signal(signal.SIGTERM)
    assert ended(process)[:2] == (code, "saved")
    assert words.read_text() == "trainer 1 was stopped by SIGTERM\n"


@pytest.mark.parametrize("starts", [HANDLED_BEFORE, HANDLED_AFTER], ids=["before", "after"])
def test_a_script_that_handles_sigterm_ends_within_the_pods_grace(replica, words, starts):
    process = replica(scripts("pass", starts, "print('on')\nwait_in_a_lock()"), FLEET_GRACE_SECONDS="2")
    assert process.stdout.read(6) == "ready "
    process.send_signal(signal.SIGTERM)
    assert ended(process)[:2] == (143, "on\n")
    assert words.read_text() == "trainer 1 was stopped by SIGTERM\n"


def test_a_trainer_that_had_completed_is_not_stopped_while_its_script_saves(replica, words):
    starts = HANDLED_BEFORE + "\nlifecycle.finish([0, 1])"
    loop = "told.wait(60)\nassert not lifecycle.refuses('a call')\nreport(step=7)"
    process = replica(scripts("told.set()", starts, loop))
    assert process.stdout.read(6) == "ready "
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    said = json.loads(words.read_text())
    assert (said["completedTrainers"], said["step"]) == ("0-1", 7)


def test_a_trainer_told_to_stop_while_it_completes_has_completed(replica, words):
    process = replica(scripts("told.set()", HANDLED_BEFORE, "told.wait(60)\nlifecycle.finish([0, 1])"))
    assert process.stdout.read(6) == "ready "
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    assert json.loads(words.read_text())["completedTrainers"] == "0-1"


def test_a_server_waits_for_no_handler(replica, words):
    starts = HANDLED_BEFORE.replace("start()", "start('SERVER')")
    process = replica(scripts("pass", starts, "wait_in_a_lock()"))
    assert process.stdout.read(6) == "ready "
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert words.read_text() == "pserver 1 was stopped by SIGTERM\n"


def test_a_forked_child_ends_alone(replica, words):
    body = """
    start()
    child = os.fork()
    if child == 0:
        time.sleep(60)
    os.kill(child, signal.SIGTERM)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
    child = os.fork()
    if child == 0:
        raise errors.PeerLostError("only in the child")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(os.path.exists(os.environ["FLEET_TERMINATION_LOG"]))
    time.sleep(0.3)
    report(step=7)
    """
    code, out, _ = ended(replica(body))
    assert (code, out) == (0, "15\n1\nFalse\n")
    assert json.loads(words.read_text())["step"] == 7


def test_a_replica_that_ends_well_leaves_its_progress(replica, words):
    body = """
    start()
    lifecycle.joined()
    report(step=3, total_steps=3, loss=0.5)
    lifecycle.finish({3, 1, 0})
    report({"test_accuracy": 0.97})
    """
    assert ended(replica(body))[0] == 0
    state = json.loads(words.read_text())
    assert (state["role"], state["index"], state["step"]) == ("TRAINER", 1, 3)
    assert state["metrics"] == {"test_accuracy": 0.97}
    assert (state["joined"], state["completedTrainers"]) == (True, "0-1,3")


def test_a_plain_script_that_reports_is_served_and_leaves_its_progress(replica, words):
    port = str(free_ports(1, "127.0.0.5")[0])
    body = f"""
    import urllib.request
    report(step=3)
    print(urllib.request.urlopen("http://127.0.0.5:{port}/progress", timeout=5).status)
    """
    environ = {"FLEET_METRICS_PORT": port, "PADDLE_CURRENT_IP": "127.0.0.5", "RANK": "2"}
    code, out, err = ended(replica(body, **environ))
    assert (code, out, err) == (0, "200\n", "")
    state = json.loads(words.read_text())
    assert (state["role"], state["index"], state["step"]) == ("TRAINER", 2, 3)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("sys.exit()", 0, id="an-exit"),
        pytest.param("sys.exit(0)", 0, id="with-0"),
        pytest.param("try: sys.exit()\nexcept SystemExit: pass", 0, id="with-nothing-and-is-caught"),
        pytest.param(
            "try: sys.exit('no cache')\nexcept SystemExit: report(step=3)",
            0,
            id="with-a-text-before-a-report",
        ),
        pytest.param(
            "it = threading.Thread(target=sys.exit, args=(3,)); it.start(); it.join(); sys.exit()",
            0,
            id="of-a-thread-before",
        ),
    ],
)
def test_a_plain_script_that_exits_successfully_leaves_its_progress(replica, words, end, status):
    assert ended(replica(f"report(step=3)\n{end}"))[0] == status
    assert json.loads(words.read_text())["step"] == 3


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("sys.exit(3)", 3, id="a-status"),
        pytest.param("sys.excepthook = sys.__excepthook__; {}['missing']", 1, id="another-hook"),
    ],
)
def test_a_plain_script_that_may_have_failed_leaves_its_log(replica, words, end, status):
    assert ended(replica(f"def main():\n    {end}\nreport(step=3)\nmain()"))[0] == status
    assert not words.exists(), "what stands there keeps the end of the log from being read"


def test_the_text_with_which_a_script_exits_is_its_last_word(replica, words):
    body = "report(step=3); sys.exit('the validation set\\nis empty')"
    code, _, err = ended(replica(body, RANK="2"))
    assert (code, err) == (1, "the validation set\nis empty\n")
    assert words.read_text() == "trainer 2: the validation set is empty\n"


def test_a_replica_that_completes_after_a_caught_exit_has_not_failed(replica, words):
    body = """
    start()
    lifecycle.joined()
    try:
        sys.exit("the cache is empty")
    except SystemExit:
        lifecycle.finish({1})
    """
    assert ended(replica(body))[0] == 0
    assert json.loads(words.read_text())["completedTrainers"] == "1"


def test_the_text_with_which_a_replica_exits_says_whether_it_had_joined(replica, words):
    assert ended(replica("start(); lifecycle.joined(); sys.exit('no data')"))[0] == 1
    assert words.read_text() == "trainer 1 (joined, no step made): no data\n"


def test_the_last_words_say_whether_a_replica_made_a_step_in_its_present_life(replica, words):
    """One that goes on at step 7 of the training has made none before it reports another."""
    for end, stage in (("7", "joined, no step made"), ("8", "joined")):
        words.unlink(missing_ok=True)
        body = f"""
        from fleet.process import progress
        step = 7
        start()
        progress.follow(lambda: step)
        lifecycle.joined()
        step = {end}
        raise KeyError("missing")
        """
        assert ended(replica(body))[0] == 1
        assert words.read_text().startswith(f"trainer 1 ({stage}): KeyError: 'missing' (at ")


def test_a_replica_that_exits_with_a_status_still_says_that_it_had_joined(replica, words):
    assert ended(replica("start(); lifecycle.joined(); sys.exit(2)"))[0] == 2
    assert json.loads(words.read_text())["joined"] is True


@pytest.mark.parametrize("end", ["pass", "raise ValueError('closed by peer')", "sys.exit('no data')"])
def test_one_of_several_plain_scripts_leaves_the_telling_to_torchrun(replica, words, end):
    environ = {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    ended(replica(f"report(step=3); {end}", **environ))
    assert not words.exists()


def test_one_of_several_plain_scripts_leaves_its_error_to_its_launcher(replica, words):
    body = "report(step=3); raise ValueError('closed by peer')"
    assert ended(replica(body, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"))[0] == 1
    assert not words.exists()


@pytest.mark.parametrize(
    ("end", "said"), [("pass", '"step":3'), ("raise ValueError('no data')", "trainer 0: ValueError: no data")]
)
def test_the_only_script_of_a_torchrun_tells_its_end(replica, words, end, said):
    environ = {"TORCHELASTIC_RUN_ID": "job", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ended(replica(f"report(step=3); {end}", **environ))
    assert said in words.read_text()


def test_the_second_process_of_a_pod_is_silent(replica, words):
    port = str(free_ports(1)[0])
    body = "start(); report(step=3); print('fleet.process.progress_server' in sys.modules)"
    assert ended(replica(body, FLEET_METRICS_PORT=port, LOCAL_RANK="1"))[:2] == (0, "False\n")
    assert not words.exists()


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_a_bad_metrics_port_is_the_users_mistake(replica, port):
    code, _, err = ended(replica("start()", FLEET_METRICS_PORT=port))
    assert code == 2
    assert f"FLEET_METRICS_PORT is '{port}'; expected a port number, 1 to 65535" in err
    assert "Traceback" not in err


def test_a_taken_metrics_port_is_a_warning(replica):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = ended(replica("start()", FLEET_METRICS_PORT=port, PADDLE_CURRENT_IP="127.0.0.1"))
    assert code == 0
    assert f"the progress is not served: 127.0.0.1 port {port}" in err


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        pytest.param("", "trainer 0 joined\nlate\n", id="all-of-it-where-nobody-has-said"),
        pytest.param("logging.basicConfig()", "WARNING:fleet.x:late\n", id="as-the-script-has-set-it-up"),
        pytest.param(
            "logging.getLogger('fleet').setLevel('WARNING')", "late\n", id="from-a-level-of-its-own"
        ),
    ],
)
def test_a_replica_shows_what_the_package_logs(replica, before, shown):
    process = replica(
        f"""
        import logging
        {before}
        start()
        logging.getLogger("fleet.x").info("trainer 0 joined")
        logging.getLogger("fleet.x").warning("late")
        logging.getLogger("another").info("never shown")
        """
    )
    status, _, err = ended(process)
    assert (status, err) == (0, shown)
