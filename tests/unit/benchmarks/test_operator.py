"""What the operator's benchmark makes of its measurements."""

import json
from pathlib import Path

import pytest

from benchmarks import operator
from benchmarks.audit import AuditLog, is_write, leases
from benchmarks.bare_client import NUM_PODS, job_manifest, objects
from benchmarks.goals import judge
from benchmarks.watched import behind
from fleet_operator.api import parse_job

ACCOUNT = "system:serviceaccount:fleet-system:"


def figures(value: float) -> dict[str, float]:
    return dict.fromkeys(operator.RATIOS, value)


def test_ratios_are_taken_within_a_round():
    rounds = [{"bare": figures(each), "fleet": figures(each / 2)} for each in (1.0, 10.0, 1000.0)]
    found = operator.report(rounds)
    assert found["ratios"] == figures(0.5)
    assert found["bare"] == figures(10.0)
    json.dumps(found, allow_nan=False)


def test_a_single_job_has_percentiles_too():
    assert operator.percentile([2.0], 99) == 2.0
    assert operator.percentile(list(range(101)), 99) == pytest.approx(99)


def test_a_job_runs_when_the_last_of_its_pods_does():
    pods = {
        "a-b-trainer-0": {"Seen": 10.5, "Running": 11.0},
        "a-b-trainer-1": {"Seen": 11.0, "Running": 12.0},
        "c-pserver-0": {"Seen": 12.0, "Running": 14.0},
        "c-trainer-0": {"Seen": 12.0, "Running": 13.0},
    }
    found = operator.speeds(pods, started=10.0)
    assert (found["created_s"], found["created_per_s"], found["running_per_s"]) == (2.0, 2.0, 1.0)
    assert found["running_p50_s"] == 3.0


def test_a_status_is_behind_until_it_says_as_much_as_the_pods():
    ran = {"job": [2.0, 1.0, 3.0], "on-time": [5.0], "never": [1.0]}
    said = {"job": [(0.5, 0), (1.5, 1), (4.0, 3)], "on-time": [(5.0, 1)]}
    found = behind(ran, said)
    assert sorted(found.seconds) == [0.0, 0.5, 1.0, 2.0, float("inf")]
    assert found.most_pods == 2


def test_the_audit_log_is_read_as_it_grows(tmp_path: Path):
    def line(verb: str, resource: str, user: str = f"{ACCOUNT}operator", subresource: str = "") -> str:
        reference = {"resource": resource, "subresource": subresource}
        return json.dumps({"verb": verb, "user": {"username": user}, "objectRef": reference}) + "\n"

    path = tmp_path / "audit.log"
    written = line("create", "pods") + line("create", "pods", user="admin") + line("update", "leases")
    half = line("update", "fleetjobs", subresource="status")
    path.write_text(written + half[:20])
    log = AuditLog(path, ACCOUNT)
    assert log.calls() == {"create pods": 1, "update leases": 1}
    path.write_text(written + half + line("watch", "pods"))
    calls = log.calls()
    assert calls == {"create pods": 1, "update leases": 1, "update fleetjobs/status": 1, "watch pods": 1}
    assert [call for call in calls if is_write(call)] == [
        "create pods",
        "update leases",
        "update fleetjobs/status",
    ]
    assert leases(calls) == 1


def test_goals_are_judged_by_what_was_measured():
    fleet = {
        "succeeded_p50_s": 0.2,
        "succeeded_p99_s": 0.2,
        "behind_longest_s": 1.0,
        "writes_per_job": 12.1,
        "cpu_seconds_per_job": 0.02,
    }
    burst = {"fleet": fleet, "ratios": {**figures(0.86), "running_p50_s": 1.3}}
    idle = {"calls": 0, "kib_per_job": 49.0, "rss_mib": 111.0, "restart_writes": 1, "restart_seconds": 30.0}
    verdicts = {
        each["goal"].partition(":")[2][1:]: each["met"] for each in judge({"100": burst}, {"1000": idle})
    }
    assert verdicts == {
        "pods Running/s, of bare: at least 0.85": True,
        "CPU seconds a job: at most 0.03": True,
        "created to Running p50, of bare: at most 1.2": False,
        "Succeeded after the last pod, p50 s: at most 0.1": False,
        "Succeeded after the last pod, p99 s: at most 0.3": True,
        "status behind the pods, longest s: at most 1": True,
        "writes a job: at most 12": False,
        "API calls in a minute: at most 0": True,
        "KiB a job: at most 50": True,
        "MiB resident: at most 110": False,
        "writes after a restart: at most 0": False,
        "steady after a restart, s: at most 30": True,
    }


def test_a_large_job_is_judged_by_its_rate_its_halts_its_memory_and_the_lease():
    jobs = {
        "running_of_bare": 0.8,
        "longest_computation_s": 0.2,
        "most_rss_mib": 109.0,
        "longest_without_renewal_s": 11.0,
    }
    found = judge({}, {}, {"small_jobs": 1000, "1000+700": jobs})
    assert [(each["goal"], each["met"]) for each in found] == [
        ("1000+700: pods Running/s, of bare: at least 0.75", True),
        ("1000+700: longest halt of the loop, s: at most 0.1", False),
        ("1000+700: MiB resident at most: at most 110", True),
        ("1000+700: s without a renewal: at most 10", False),
    ]


def test_what_is_printed_has_every_figure_and_verdict():
    round_ = {"bare": figures(2.0), "fleet": {**figures(1.0), "writes_per_job": 11.0}}
    found = {
        "bursts": {"1": operator.report([round_])},
        "idle": {"10": {"jobs_running": 4, "calls": 2, "calls_by_kind": {"watch pods": 2}}},
        "goals": [{"goal": "writes", "measured": 11.0, "met": True}],
    }
    text = "\n".join(operator.lines(found))
    assert "1.000       2.000 bare    0.50 of bare" in text
    assert "4 running and the others suspended" in text
    assert "{'watch pods': 2}" in text
    assert text.endswith("met      11.000  writes")


def test_the_bare_client_creates_what_the_operator_does():
    made = list(objects(parse_job(job_manifest("job-0", "default"))))
    assert [plural for plural, _ in made] == [
        "services",
        "networkpolicies.networking.k8s.io",
        *["pods"] * NUM_PODS,
    ]
    assert {manifest["metadata"]["name"] for plural, manifest in made if plural == "pods"} == {
        f"job-0-{role}-{index}" for role in ("pserver", "trainer") for index in (0, 1)
    }
    assert all(1500 < len(json.dumps(manifest)) < 6000 for plural, manifest in made if plural == "pods")


def test_a_large_job_that_nobody_knows_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        operator.main(["--large", "0", "--large-cases", "1000+700,10000"])
    assert "10000; expected 1000+700, collective-1000, 8-restarts-of-200" in capsys.readouterr().err
