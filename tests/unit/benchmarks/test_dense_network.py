"""What the benchmark of the network makes of its measurements, and a small run of it on limited links."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import dense_network
from benchmarks.cases import Case, parse_cases
from benchmarks.counters import Segments
from benchmarks.dense_network import Round
from benchmarks.network import PREFIX, leftovers, network, unmet_needs
from benchmarks.systems import SYSTEMS
from tests.support.processes import alive

TINY = ["--widths=16,26,26", "--rounds=1", "--steps=2"]


def rounds(*seconds: float, resent: int = 0) -> list[Round]:
    return [Round(each, Segments(sent=1000, resent=resent)) for each in seconds]


def test_every_system_is_held_against_its_own_limit_and_ddp_within_a_round():
    measured = {"ddp": rounds(4.0, 8.0), "fleet": rounds(2.5, 4.0, resent=10), "bf16": rounds(2.0, 2.0)}
    found = dense_network.report(Case(4, 4, 400), measured, parameter_bytes=100_000_000, steps=2)
    fleet = found["systems"]["fleet"]
    assert fleet["limit_seconds"] == 2.0
    assert fleet["of_limit"]["median"] == pytest.approx((2 / 2.5 + 2 / 4) / 2)
    assert fleet["speed_to_ddp"]["median"] == pytest.approx((4 / 2.5 + 8 / 4) / 2)
    assert found["systems"]["bf16"]["of_limit"]["median"] == pytest.approx(0.5)
    assert found["systems"]["ddp"]["limit_seconds"] == 3.0
    assert fleet["resent_segments_per_step"] == 5.0
    assert fleet["resent_share"] == pytest.approx(0.01)
    json.dumps(found, allow_nan=False)


def test_a_table_shows_limits_ratios_and_what_was_sent_again(capsys):
    measured = {"ddp": rounds(4.0), "fleet": rounds(2.5, resent=10), "compute": rounds(0.1)}
    dense_network.show(dense_network.report(Case(4, 4, 400), measured, parameter_bytes=100_000_000, steps=2))
    title, ddp, fleet, compute = capsys.readouterr().out.splitlines()[:4]
    assert " ".join(title.split()) == (
        "4+4@400: 100.0 MB of parameters limit s s/step of limit x ddp resent/step"
    )
    assert ddp.endswith(" 0 (0.00 %)")
    assert " ".join(fleet.split()) == "ours 2.000 2.500 0.80 [0.80-0.80] 1.60 [1.60-1.60] 5 (1.00 %)"
    assert "0.00 [0.00-0.00]" in compute


def test_without_ddp_there_is_nothing_to_compare_with():
    found = dense_network.report(Case(2, 2, 400), {"fleet": rounds(2.5)}, parameter_bytes=1000, steps=2)
    assert "speed_to_ddp" not in found["systems"]["fleet"]
    dense_network.show(found)


def test_every_system_is_known_and_served_where_it_has_servers():
    assert set(dense_network.DEFAULT_SYSTEMS) <= set(dense_network.ABOUT) <= set(SYSTEMS)
    served = {name for name in dense_network.ABOUT if SYSTEMS[name].serve is not None}
    assert served == set(dense_network.SERVED)
    assert parse_cases(dense_network.DEFAULT_CASES)


@pytest.mark.parametrize(
    "flags",
    [
        ["--cases=4+4"],
        ["--systems=rpc"],
        ["--systems=ddp,ddp"],
        ["--rounds=0"],
        ["--steps=0"],
        ["--widths=16"],
        ["--widths=16,x"],
        ["--widths=16,0"],
    ],
)
def test_a_bad_flag_ends_before_anything_starts(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dense_network", *flags])
    with pytest.raises(SystemExit) as ended:
        dense_network.main()
    assert ended.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err


def test_the_commands_of_the_documentation_are_understood(monkeypatch):
    shown = re.findall(r"python -m benchmarks\.dense_network([^`\n]*)", Path("docs/speed.md").read_text())
    assert shown
    for flags in shown:
        monkeypatch.setattr("sys.argv", ["dense_network", *shlex.split(flags)])
        assert dense_network.read_options()


def test_without_root_or_iproute2_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["dense_network"])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as ended:
        dense_network.main()
    assert ended.value.code == (
        "benchmarks.dense_network: hosts with limited links need root and iproute2, "
        "found no root and no `ip` and no `tc`: install it, use sudo"
    )


def test_what_would_take_more_memory_than_there_is_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(dense_network, "MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 24000000 kB\nMemAvailable:    8000000 kB\n")
    dense_network.check_memory(Case(4, 4, 400), ["ddp", "fleet"], 100_000_000)
    with pytest.raises(
        SystemExit, match=r"4\+4@400 with ddp, fleet, cross takes about 13 GB .* 8 GB are avail"
    ):
        dense_network.check_memory(Case(4, 4, 400), ["ddp", "fleet", "cross"], 100_000_000)


def test_what_a_run_that_is_no_more_has_left_is_told_from_what_others_use():
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, used = f"{PREFIX}{gone.pid}-0", f"{PREFIX}{os.getpid()}-0"
    assert leftovers([left, used, "somebody-elses"]) == [left]


def no_network() -> str | None:
    """Return why no network can be made here; None where one can."""
    if (unmet := unmet_needs()) is not None:
        return unmet
    try:
        with network(1, 100):
            return None
    except SystemExit as refused:
        return str(refused)


@pytest.fixture(scope="module")
def _can_make_networks() -> None:
    if (why := no_network()) is not None:
        pytest.skip(why)


def own_namespaces(pid: int) -> list[str]:
    return [each.name for each in Path("/run/netns").glob(f"{PREFIX}{pid}-*")]


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.dense_network", *TINY, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.programs
@pytest.mark.usefixtures("_can_make_networks")
class TestOnLimitedLinks:
    def test_a_small_run_measures_traces_and_leaves_nothing(self, tmp_path):
        process = start("--cases=2+1@50", "--systems=fleet", "--json", f"--trace={tmp_path}/trace.csv")
        out, err = process.communicate(timeout=110)
        assert process.returncode == 0, err
        (case,) = json.loads(out)["cases"]
        assert set(case["systems"]) == {"fleet"}
        assert case["systems"]["fleet"]["seconds"]["median"] > case["systems"]["fleet"]["limit_seconds"] > 0
        trace = (tmp_path / "trace.csv").read_text().splitlines()
        assert {row.split(",")[4] for row in trace[1:] if ",fleet," in row} == {
            *("trainer0", "trainer1", "server0")
        }
        assert own_namespaces(process.pid) == []

    def test_ctrl_c_removes_the_network_and_ends_every_process(self):
        process = start("--cases=2+2@50", "--systems=ddp", "--rounds=100000")
        stderr = process.stderr
        assert stderr is not None
        for line in stderr:
            if "round 1 of" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        assert own_namespaces(process.pid) != []
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        assert own_namespaces(process.pid) == []
        assert not any(alive(int(child)) for child in children)

    def test_links_carry_their_rate_and_no_more(self):
        with network(2, 100) as hosts:
            (endpoint,) = hosts.endpoints([1])
            address, _, port = endpoint.partition(":")
            receive = (
                f"import socket; s = socket.create_server(({address!r}, {port})); print('up', flush=True)\n"
                "c, _ = s.accept()\nwhile c.recv(1 << 20): pass"
            )
            send = (
                f"import socket; c = socket.create_connection(({address!r}, {port}))\n"
                "c.sendall(bytes(2_500_000)); c.shutdown(socket.SHUT_WR); c.recv(1)"
            )
            with subprocess.Popen(
                hosts.command(1, [sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True
            ) as receiver:
                assert receiver.stdout is not None
                assert receiver.stdout.readline() == "up\n"
                began = time.monotonic()
                subprocess.run(hosts.command(0, [sys.executable, "-c", send]), check=True, timeout=60)
            assert time.monotonic() - began > 0.18  # 20 Mbit less the bursts, at 100 Mbit/s
