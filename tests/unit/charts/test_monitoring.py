"""Dashboard and alerts: every series and label that they name is one that the operator serves."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fleet.process.progress import Progress
from fleet.process.progress_server import GAUGES, TABLES, prometheus_text
from fleet_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    FleetJobStatus,
    JobState,
    Role,
)
from fleet_operator.build import ClusterHosts, build_pod
from fleet_operator.cluster import Key
from fleet_operator.engine import Result
from fleet_operator.metrics import Metrics
from fleet_operator.plan.model import Attempt, CreatePod, DeletePod
from tests.support.jobs import job
from tests.unit.charts.test_fleet_operator import CHART, helm_says, one, render

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.programs

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
DOCS = Path("docs/operations.md")

ALL = ["serviceMonitor", "podMonitor", "rules", "dashboard"]
ON = [f"metrics.{each}.enabled=true" for each in ALL]

FUNCTIONS = {
    "absent",
    "histogram_quantile",
    "increase",
    "label_values",
    "max",
    "max_over_time",
    "rate",
    "sum",
}
WORDS = {"and", "by", "offset", "on", "or", "unless"}
OF_THE_TARGET = {"instance", "job"}  # labels that Prometheus adds


@pytest.fixture(scope="module")
def helm() -> Path:
    from tools import assets

    return assets.find(["helm"])["helm"]


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """What Prometheus reads from an operator that has seen all there is: series, and their labels."""
    metrics, created = Metrics(), job(creationTimestamp="2026-01-01T00:00:00Z")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    failed = Condition(
        type=ConditionType.FAILED, status=ConditionStatus.TRUE, reason="R", last_transition_time=start
    )
    running = FleetJobStatus(state=JobState.RUNNING)
    again = FleetJobStatus(state=JobState.RUNNING, restarts=1)
    for end in (JobState.SUCCEEDED, JobState.FAILED):
        done = FleetJobStatus(state=end, start_time=start, completion_time=start, conditions=(failed,))
        for before, after in ((FleetJobStatus(), running), (running, again), (again, done)):
            metrics.status_written(created.with_status(before), created.with_status(after))
    metrics.watch_jobs(lambda: [created])
    metrics.watch_watches(lambda: [("pods", None, 0.0)])
    metrics.applied(created, CreatePod(dict))
    metrics.applied(created, DeletePod("p", "u"))
    metrics.passed(Key("default", "digits"), Result.FAILED, 0.1)
    metrics.deleted(Key("default", "digits"))
    metrics.requested("GET", "pods", 200, 0.1)
    metrics.progress_read(answered=True)
    texts = [generate_latest(metrics.registry), *of_replicas()]
    families = [each for text in texts for each in text_string_to_metric_families(text.decode())]
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def of_replicas() -> list[bytes]:
    """What Prometheus reads from a trainer that has reported all there is, and from a server with a table."""
    trainer, server = Progress(), Progress()
    trainer.identify("TRAINER", 0)
    for samples in (32, 64):
        trainer.report({"accuracy": 0.5}, step=2, total_steps=10, loss=0.5, samples=samples)
    server.identify("PSERVER", 0)
    server.holds(1024)
    table = {"name": "clicks", "rows": 3, "bytes": 96, "rowsOnDisk": 1, "lookedUp": 4, "found": 3}
    server.show_tables(lambda: ({**table, "shardSkew": 1.5, "rowsOfFullestShard": 2},))
    state = trainer.snapshot()
    return [prometheus_text(each, {}) for each in (state | {"samplesPerSecond": 9.0}, server.snapshot())]


def expressions() -> Iterator[tuple[str, str]]:
    """Give every PromQL expression there is, and where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """Return the series and the labels that an expression names."""
    rest = re.sub(r'"[^"]*"', '""', expression)
    rest = re.sub(r"\[[^\]]*\]", "", rest)  # ranges
    labels = {
        each for inner in re.findall(r"\{([^}]*)\}", rest) for each in re.findall(r"(\w+)\s*[=!]", inner)
    }
    rest = re.sub(r"\{[^}]*\}", "", rest)
    for inner in re.findall(r"\b(?:by|on) \(([^)]*)\)", rest):
        labels |= set(re.findall(r"\w+", inner))
    labels |= {last for _, last in re.findall(r"label_values\((\w+), (\w+)\)", rest)}
    rest = re.sub(r"\b(by|on) \([^)]*\)", "", rest)
    rest = re.sub(r"(label_values\(\w+), \w+\)", r"\1)", rest)
    words = set(re.findall(r"\b[a-zA-Z_:][\w:]*", rest))
    return words - FUNCTIONS - WORDS, labels


@pytest.mark.parametrize(("where", "expression"), [pytest.param(*each, id=each[0]) for each in expressions()])
def test_what_is_named_is_served(served: dict[str, set[str]], where: str, expression: str):
    series, labels = names_in(expression)
    assert series
    assert series <= served.keys()
    assert labels <= set.union(*(served[each] for each in series), OF_THE_TARGET)


def test_the_test_itself_sees_a_wrong_name(served: dict[str, set[str]]):
    series, labels = names_in('sum by (le, x) (rate(fleet_operator_jobs_lost_total{y="a"}[5m]))')
    assert (series, labels) == ({"fleet_operator_jobs_lost_total"}, {"le", "x", "y"})
    assert not series & served.keys()


def test_every_series_of_ours_is_on_the_dashboard(served: dict[str, set[str]]):
    shown = {
        name for where, each in expressions() if not where.startswith("alert") for name in names_in(each)[0]
    }
    ends = r"_(bucket|count|sum|total|created)$"
    ours = {re.sub(ends, "", name) for name in served if name.startswith("fleet_operator_")}
    ours |= {name for name, *_ in (*GAUGES.values(), *TABLES.values())} | {"fleet_metric"}
    assert ours - {re.sub(ends, "", name) for name in shown} == set()


def test_there_are_no_metrics_and_no_dashboards(helm: Path, served: dict[str, set[str]]):
    assert len([name for name in served if name.startswith("fleet_operator_")]) > 10
    kinds = {each["kind"] for each in render(helm, *ON)}
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= kinds
    assert len(DASHBOARD["panels"]) > 5


def test_panels_stand_beside_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_say_what_is_wrong_and_the_docs_what_to_do():
    told = DOCS.read_text()
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert {"summary", "description"} <= rule["annotations"].keys()
            assert f"`{rule['alert']}`" in told


def kinds(manifests: list[dict[str, Any]]) -> set[str]:
    return {each["kind"] for each in manifests}


def test_nothing_of_it_is_there_unless_asked_for(helm: Path):
    assert not kinds(render(helm)) & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("serviceMonitor", {"ServiceMonitor"}),
        ("podMonitor", {"PodMonitor"}),
        ("rules", {"PrometheusRule"}),
        ("dashboard", {"ConfigMap"}),
    ],
)
def test_each_is_switched_on_by_itself(helm: Path, name: str, made: set[str]):
    manifests = render(helm, f"metrics.{name}.enabled=true", f"metrics.{name}.labels.release=monitoring")
    assert kinds(manifests) - kinds(render(helm)) == made
    (kind,) = made - {"Service"}
    assert one(manifests, kind)["metadata"]["labels"]["release"] == "monitoring"


def test_prometheus_finds_the_operators_port(helm: Path):
    manifests = render(helm, *ON)
    pods = one(manifests, "Deployment")["spec"]["template"]
    service, monitor = one(manifests, "Service"), one(manifests, "ServiceMonitor")
    assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    names = [each["name"] for each in pods["spec"]["containers"][0]["ports"]]
    assert port["targetPort"] in names


@pytest.mark.parametrize("namespaces", [(), ("operator.namespaces={team-a,team-b}",)])
def test_prometheus_finds_the_replicas_of_the_served_jobs(helm: Path, namespaces: tuple[str, ...]):
    monitor = one(render(helm, *ON, *namespaces), "PodMonitor")["spec"]
    served = {"matchNames": ["team-a", "team-b"]} if namespaces else {"any": True}
    assert monitor["namespaceSelector"] == served
    (selector,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    created = job()
    for role in Role:
        pod = build_pod(created, role, 0, Attempt(), ClusterHosts(created))
        assert selector["operator"] == "Exists"
        assert selector["key"] in pod["metadata"]["labels"]
        assert endpoint["port"] in [each["name"] for each in pod["spec"]["containers"][0]["ports"]]


def test_the_port_is_read_once(helm: Path):
    def annotations(*sets: str) -> dict[str, str]:
        metadata = one(render(helm, *sets), "Deployment")["spec"]["template"]["metadata"]
        return metadata.get("annotations") or {}

    assert annotations()["prometheus.io/port"] == "8080"
    assert annotations("metrics.serviceMonitor.enabled=true") == {}
    assert annotations("metrics.serviceMonitor.enabled=true", "podAnnotations.a=b") == {"a": "b"}


def test_annotations_of_the_values_win_and_none_is_there_twice(helm: Path):
    own = r"podAnnotations.prometheus\.io/scrape=false"
    ended = helm_says(helm, "template", "fleet", str(CHART), "--set-string", own)
    assert ended.stdout.count("prometheus.io/scrape:") == 1
    assert 'prometheus.io/scrape: "false"' in ended.stdout
    assert 'prometheus.io/port: "8080"' in ended.stdout


def test_files_arrive_as_they_are(helm: Path):
    manifests = render(helm, *ON)
    assert one(manifests, "PrometheusRule")["spec"] == ALERTS
    assert json.loads(one(manifests, "ConfigMap")["data"]["fleetjobs.json"]) == DASHBOARD


def test_lint_finds_nothing_with_all_of_it_on(helm: Path):
    sets = [word for value in ON for word in ("--set", value)]
    ended = helm_says(helm, "lint", "--strict", str(CHART), *sets)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_wrong_interval_is_refused(helm: Path):
    sets = ["--set", "metrics.serviceMonitor.interval=often"]
    ended = helm_says(helm, "template", "fleet", str(CHART), *sets)
    assert ended.returncode != 0
    assert "interval" in ended.stderr
