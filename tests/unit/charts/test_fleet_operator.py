"""The chart: what helm makes of it, and that it holds what the rest of the repository says."""

from __future__ import annotations

import copy
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fleet_operator.settings import FEATURES, Settings, SettingsError
from tools import assets
from tools.chart_page import values as values_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.programs

CHART = Path("charts/fleet-operator")
CRD = Path("crds/fleetjobs.fleetjob.dev.yaml")
NAMES = ["operator.namespaces={team-a,team-b}"]
READER = "networkPolicies.metricsReaders[0]"
SERVING = "fleetjob.dev:operator"
"""What the role of every release is called, so that no two serve the same jobs."""
CLUSTER_WIDE = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
EXPRESSION = f"{READER}.podSelector.matchExpressions[0]"


@pytest.fixture(scope="module")
def helm() -> Path:
    return assets.find(["helm"])["helm"]


def helm_says(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm, *arguments, "--kube-version", "1.34.0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def render(helm: Path, *values: str, chart: Path = CHART) -> list[dict[str, Any]]:
    """Return the manifests of a release `fleet` in the namespace `fleet-system`."""
    return copy.deepcopy(_rendered(helm, values, chart))


@functools.cache
def _rendered(helm: Path, values: tuple[str, ...], chart: Path) -> list[dict[str, Any]]:
    sets = [word for value in values for word in ("--set", value)]
    ended = helm_says(helm, "template", "fleet", str(chart), "--namespace", "fleet-system", *sets)
    assert ended.returncode == 0, ended.stderr
    return [manifest for manifest in yaml.load_all(ended.stdout, yaml.CSafeLoader) if manifest]


def one(manifests: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = [
        each for each in manifests if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def chart_with_notes(folder: Path) -> Path:
    """Return a copy of the chart whose notes are an object: helm shows them only to who has a cluster."""
    chart = shutil.copytree(CHART, folder / "chart")
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + text + "{{ end }}")
    (chart / "templates" / "notes.yaml").write_text(
        '{kind: Notes, metadata: {name: notes}, text: {{ include "notes" . | toJson }}}'
    )
    return chart


def notes(manifests: list[dict[str, Any]]) -> str:
    return str(one(manifests, "Notes")["text"])


def container(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_the_chart_is_not_valid(helm):
    for values in ([], NAMES, [f"features.{feature}=true" for feature in FEATURES]):
        for document in render(helm, *values):
            assert {"apiVersion", "kind", "metadata"} <= document.keys()


def test_a_release_may_be_named_by_a_number_and_at_length(helm):
    long = "n" * 63
    sets = ("--set", f"fullnameOverride={long}", "--set", "metrics.serviceMonitor.enabled=true")
    ended = helm_says(helm, "template", "2026", str(CHART), *sets)
    assert ended.returncode == 0, ended.stderr
    manifests = [each for each in yaml.safe_load_all(ended.stdout) if each]
    labels = [each["metadata"].get("labels", {}) for each in manifests]
    assert all(isinstance(value, str) for of_one in labels for value in of_one.values())
    assert max(len(each["metadata"]["name"]) for each in manifests if each["kind"] == "Service") <= 63


def test_everything_may_be_named_by_a_number(helm):
    on = [f"metrics.{each}.enabled=true" for each in ("serviceMonitor", "rules", "dashboard")]
    sets = [word for value in on for word in ("--set", value)]
    number = ("--set-string", "fullnameOverride=2026")
    ended = helm_says(helm, "template", "fleet", str(CHART), *number, *sets)
    assert ended.returncode == 0, ended.stderr
    assert '"2026"' in ended.stdout
    assert not re.search(r": 2026\s", ended.stdout), "it would be read as a number"


def test_each_value_is_described_and_has_a_schema():
    described = list(values_of(CHART))
    assert [each.name for each in described if not each.meaning] == []
    assert [each.name for each in described if not each.schema] == []
    in_schema = set(_leaves(json.loads((CHART / "values.schema.json").read_text())["properties"]))
    assert in_schema - {"global"} == {each.name for each in described if not each.is_group}


def _leaves(properties: dict[str, Any], group: str = "") -> Iterator[str]:
    for name, schema in properties.items():
        if "properties" in schema:
            yield from _leaves(schema["properties"], f"{group}{name}.")
        else:
            yield f"{group}{name}"


def test_lint_finds_nothing(helm):
    ended = helm_says(helm, "lint", "--strict", str(CHART))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_definition_is_the_generated_one():
    assert (CHART / "files" / CRD.name).read_text() == CRD.read_text(), "run `make crds`"
    definition = yaml.safe_load(CRD.read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (listed,) = yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])
    assert listed["name"] == definition["metadata"]["name"]
    assert listed["kind"] == definition["spec"]["names"]["kind"]
    assert listed["version"] == definition["spec"]["versions"][0]["name"]


@pytest.mark.parametrize("keep", [True, False])
def test_the_definition_is_installed_whole(helm, keep):
    crd = one(render(helm, f"crd.keep={str(keep).lower()}"), "CustomResourceDefinition")
    expected = yaml.safe_load(CRD.read_text())
    assert crd["spec"] == expected["spec"]
    assert crd["metadata"]["name"] == expected["metadata"]["name"]
    annotations = crd["metadata"].get("annotations") or {}
    assert (annotations.get("helm.sh/resource-policy") == "keep") is keep


def test_the_definition_can_be_left_out(helm):
    assert "CustomResourceDefinition" not in {each["kind"] for each in render(helm, "crd.install=false")}


def test_the_operator_may_do_what_it_does_and_nothing_else(helm):
    rules = one(render(helm), "ClusterRole", SERVING)["rules"]
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    everyday = {"get", "list", "watch", "create", "delete"}
    assert granted == {
        ("fleetjob.dev", "fleetjobs"): {"get", "list", "watch", "delete"},
        ("fleetjob.dev", "fleetjobs/status"): {"update"},
        ("fleetjob.dev", "fleetjobs/finalizers"): {"update"},
        ("", "pods"): everyday,
        ("", "services"): everyday,
        ("", "events"): {"create", "patch"},
        ("networking.k8s.io", "networkpolicies"): everyday,
    }


CHANGING = {"get", "list", "watch", "create", "delete"}


@pytest.mark.parametrize(
    ("feature", "granted"),
    [
        ("checkpointClaims", {("", "persistentvolumeclaims"): CHANGING - {"delete"}}),
        ("networkPolicies", {("networking.k8s.io", "networkpolicies"): CHANGING}),
        ("podDisruptionBudgets", {("policy", "poddisruptionbudgets"): CHANGING}),
        ("volcano", {("scheduling.volcano.sh", "podgroups"): CHANGING}),
        ("coscheduling", {("scheduling.x-k8s.io", "podgroups"): CHANGING}),
        ("kueue", {("kueue.x-k8s.io", "workloads"): {"list"}, ("", "events"): {"list"}}),
    ],
)
def test_each_feature_is_a_right_of_its_own_and_a_setting(helm, feature, granted):
    off = [f"features.{each}=false" for each in FEATURES]
    plain, more = render(helm, *off), render(helm, *off, f"features.{feature}=true")
    rules = [one(each, "ClusterRole", SERVING)["rules"] for each in (plain, more)]
    added = [rule for rule in rules[1] if rule not in rules[0]]
    assert {
        (group, resource): set(rule["verbs"])
        for rule in added
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    } == granted
    env = {each["name"]: each["value"] for each in container(more)["env"] if "value" in each}
    assert Settings.from_environment(env).features == (feature,)


def test_its_own_lease_is_granted_in_its_own_namespace_only(helm):
    manifests = render(helm)
    role = one(manifests, "Role")
    assert role["metadata"]["namespace"] == "fleet-system"
    env = {each["name"]: each.get("value") for each in container(manifests)["env"]}
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert role["rules"] == [
        leases | {"verbs": ["create"]},
        leases | {"resourceNames": [env["FLEET_OPERATOR_LEASE"]], "verbs": ["get", "update"]},
    ]


def test_the_lease_is_made_by_operators_only(helm):
    assert not [each for each in render(helm) if each["kind"] == "Lease"]


def test_no_right_is_a_wildcard(helm):
    roles = [each for each in render(helm) if each["kind"] in ("Role", "ClusterRole")]
    assert roles
    assert "*" not in {
        word for role in roles for rule in role["rules"] for words in rule.values() for word in words
    }


def test_the_operator_may_do_too_much(helm):
    everything = [f"features.{feature}=true" for feature in FEATURES]
    for values in ([], everything, [*everything, *NAMES]):
        for role in (each for each in render(helm, *values) if each["kind"] in ("ClusterRole", "Role")):
            if "aggregate" in str(role["metadata"].get("labels")):
                continue  # for people
            resources = {resource for rule in role["rules"] for resource in rule["resources"]}
            verbs = {verb for rule in role["rules"] for verb in rule["verbs"]}
            assert not resources & {
                "secrets",
                "nodes",
                "configmaps",
                "pods/log",
                "pods/exec",
                "pods/attach",
                "*",
            }
            assert not verbs & {"impersonate", "escalate", "bind", "deletecollection", "*"}


def test_rights_go_to_the_operators_own_account(helm):
    manifests = render(helm)
    account = one(manifests, "ServiceAccount")["metadata"]["name"]
    assert one(manifests, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account
    for binding in ("ClusterRoleBinding", "RoleBinding"):
        (subject,) = one(manifests, binding)["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "fleet-system"}


def test_with_namespaces_it_has_rights_in_these_only(helm):
    manifests = render(helm, *NAMES)
    assert "ClusterRoleBinding" not in {each["kind"] for each in manifests}
    roles = [each for each in manifests if each["kind"] == "Role" and each["metadata"]["name"] == SERVING]
    bound = [each for each in manifests if each["kind"] == "RoleBinding"]
    assert [each["metadata"]["namespace"] for each in roles] == ["team-a", "team-b"]
    assert {each["roleRef"]["kind"] for each in bound} == {"Role"}
    assert {each["metadata"]["namespace"] for each in bound} == {"team-a", "team-b", "fleet-system"}
    assert [each["rules"] for each in roles] == [one(render(helm), "ClusterRole", SERVING)["rules"]] * 2


def test_an_installation_may_have_nothing_outside_of_namespaces(helm):
    everywhere = {each["kind"] for each in render(helm, *NAMES)} & CLUSTER_WIDE
    assert everywhere == {"CustomResourceDefinition", "ClusterRole"}  # of people
    manifests = render(helm, *NAMES, "rbac.aggregate=false", "crd.install=false")
    assert all(each["metadata"]["namespace"] for each in manifests)
    assert not {each["kind"] for each in manifests} & CLUSTER_WIDE


def test_releases_of_one_name_in_two_namespaces_share_no_name_but_that_of_their_rights(helm):
    def names(namespace: str, serves: str) -> set[tuple[str, str, str]]:
        sets = ("--set", f"operator.namespaces={{{serves}}}", "--set", "crd.install=false")
        ended = helm_says(helm, "template", "fleet", str(CHART), "--namespace", namespace, *sets)
        metadata = [(each["kind"], each["metadata"]) for each in yaml.safe_load_all(ended.stdout) if each]
        return {(kind, told.get("namespace", ""), told["name"]) for kind, told in metadata}

    assert not names("fleet-a", "team-a") & names("fleet-b", "team-b")
    shared = names("fleet-a", "team-a") & names("fleet-b", "team-a")
    assert shared == {("Role", "team-a", SERVING), ("RoleBinding", "team-a", SERVING)}


def test_the_users_of_a_namespace_may_come_from_the_cluster(helm):
    """OpenShift's restricted-v2 refuses a user that is not of the namespace's range."""
    any_user = ["podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null"]
    manifests = render(helm, *any_user)
    for pod in (one(manifests, "Deployment")["spec"]["template"]["spec"], one(manifests, "Pod")["spec"]):
        expected = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["securityContext"] == expected


def test_an_image_is_named_by_its_digest(helm):
    digest = f"sha256:{'0a' * 32}"
    manifests = render(
        helm, f"image.digest={digest}", "image.tag=two", "image.repository=r.example.org/fleet"
    )
    assert container(manifests)["image"] == f"r.example.org/fleet@{digest}"
    assert one(manifests, "Pod")["spec"]["containers"][0]["image"] == f"r.example.org/fleet@{digest}"


def test_a_pod_has_what_else_the_values_give_it(helm):
    volume, mount = {"name": "ca", "configMap": {"name": "ca"}}, {"name": "ca", "mountPath": "/etc/ca"}
    variable = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    values = {"extraVolumes": [volume], "extraVolumeMounts": [mount], "extraEnv": [variable]}
    sets = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    more = ("--set", "extraArgs={--help},priorityClassName=high,terminationGracePeriodSeconds=40")
    ended = helm_says(helm, "template", "fleet", str(CHART), *sets, *more)
    manifests = [each for each in yaml.safe_load_all(ended.stdout) if each]
    pod, plain = one(manifests, "Deployment")["spec"]["template"]["spec"], container(render(helm))
    assert (pod["priorityClassName"], pod["terminationGracePeriodSeconds"]) == ("high", 40)
    assert volume in pod["volumes"]
    assert container(manifests)["args"] == ["operator", "--help"]
    assert container(manifests)["env"] == [*plain["env"], variable]
    assert container(manifests)["volumeMounts"] == [*plain["volumeMounts"], mount]


def test_every_object_has_the_common_labels(helm):
    on = [f"metrics.{each}.enabled=true" for each in ("serviceMonitor", "rules", "dashboard")]
    labels = [
        "commonLabels.team=ml",
        "commonLabels.app\\.kubernetes\\.io/instance=other",
        "podLabels.team=ops",
    ]
    manifests = render(helm, *on, "podDisruptionBudget.enabled=true", *labels)
    for document in manifests:
        found = document["metadata"]["labels"]
        assert (found["team"], found["app.kubernetes.io/instance"]) == ("ml", "fleet"), document["metadata"]
    deployment = one(manifests, "Deployment")["spec"]
    assert deployment["selector"] == one(render(helm), "Deployment")["spec"]["selector"], (
        "it cannot be changed"
    )
    of_pods = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= of_pods.items()
    assert of_pods["team"] == "ops"


def test_a_drained_node_does_not_end_all_operators(helm):
    assert "PodDisruptionBudget" not in {each["kind"] for each in render(helm)}
    manifests = render(helm, "replicas=2", "podDisruptionBudget.enabled=true")
    spec, deployment = one(manifests, "PodDisruptionBudget")["spec"], one(manifests, "Deployment")["spec"]
    assert spec["selector"] == deployment["selector"]
    assert spec["maxUnavailable"] == 1
    half = render(helm, "podDisruptionBudget.enabled=true", "podDisruptionBudget.maxUnavailable=50%")
    assert one(half, "PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"


class Ready(http.server.BaseHTTPRequestHandler):
    """An operator that is ready at the second request."""

    unready = True

    def do_GET(self) -> None:
        status, Ready.unready = (503 if Ready.unready else 200), False
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"ok\n" if self.path == "/readyz" else b"another page\n")


def test_helm_test_asks_the_operators_by_their_service(helm):
    manifests = render(helm, f"{READER}.podSelector.matchLabels.app=prometheus")
    service, pod = one(manifests, "Service"), one(manifests, "Pod")
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (program,) = pod["spec"]["containers"][0]["args"]
    address = f"http://{name}.{namespace}.svc:{service['spec']['ports'][0]['port']}"
    assert f'"{address}/readyz"' in program
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = program.replace(address, f"http://127.0.0.1:{server.server_port}")
        ended = subprocess.run(
            [sys.executable, "-c", here], capture_output=True, text=True, timeout=60, check=False
        )
        server.shutdown()
    assert (ended.returncode, ended.stdout.split()[-1]) == (0, "ok"), ended.stderr
    admitted = policies(manifests)["fleet-system", "fleet-fleet-operator"]["ingress"][0]["from"]
    assert any(
        peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items() for peer in admitted
    )


def test_the_container_is_restricted(helm):
    manifests = render(helm)
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(manifests)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"requests", "limits"} <= container(manifests)["resources"].keys()


def test_the_probes_ask_where_the_operator_answers(helm):
    spec = container(render(helm))
    paths = {probe: spec[probe]["httpGet"]["path"] for probe in spec if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert spec["ports"] == [{"name": "http", "containerPort": Settings().http_port}]


@pytest.mark.parametrize("values", [[], NAMES], ids=["as it comes", "two namespaces"])
def test_the_operator_understands_its_settings(helm, values):
    env = {each["name"]: each.get("value", "a-pod") for each in container(render(helm, *values))["env"]}
    settings = Settings.from_environment(env)
    namespaces = ("team-a", "team-b") if values else ()
    features = ("networkPolicies",)
    lease, identity = "fleet-fleet-operator", "a-pod"
    assert settings == Settings(namespaces=namespaces, features=features, lease=lease, identity=identity)


def test_who_may_read_the_metrics_of_jobs_is_a_value(helm):
    peers = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
            "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["prometheus"]}]},
        },
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
        {"ipBlock": {"cidr": "fd00::/8"}},
    ]
    ended = helm_says(
        helm,
        *("template", "fleet", str(CHART)),
        *("--set-json", f"networkPolicies.metricsReaders={json.dumps(peers)}"),
    )
    assert ended.returncode == 0, ended.stderr
    env = container([each for each in yaml.safe_load_all(ended.stdout) if each])["env"]
    settings = Settings.from_environment({each["name"]: each.get("value", "") for each in env})
    assert settings.metrics_readers == tuple(peers)


def policies(manifests: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = [each for each in manifests if each["kind"] == "NetworkPolicy"]
    return {(each["metadata"]["namespace"], each["metadata"]["name"]): each["spec"] for each in found}


def test_the_operators_pods_are_reached_on_their_one_port_only(helm):
    manifests = render(helm)
    assert policies(manifests).keys() == {("fleet-system", "fleet-fleet-operator")}
    policy = policies(manifests)["fleet-system", "fleet-fleet-operator"]
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"].keys() == {"matchLabels"}
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    port = {"port": container(manifests)["ports"][0]["containerPort"], "protocol": "TCP"}
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress"], [{"ports": [port]}])


def test_readers_of_metrics_are_let_in_and_nobody_else(helm):
    found = policies(render(helm, f"{READER}.podSelector.matchLabels.app=prometheus"))
    reading = found["fleet-system", "fleet-fleet-operator"]["ingress"][0]
    assert reading["from"][1:] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]


def test_the_operators_policy_is_a_value(helm):
    assert policies(render(helm, "networkPolicies.operator=false")) == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "and, on their metrics port, by everyone"),
        ([f"{READER}.podSelector.matchLabels.app=prometheus"], "by networkPolicies.metricsReaders and this"),
        (["features.networkPolicies=false"], "Jobs get no NetworkPolicy"),
    ],
)
def test_the_notes_say_who_reaches_the_pods_of_jobs(helm, tmp_path, values, expected):
    assert expected in notes(render(helm, *values, chart=chart_with_notes(tmp_path)))


@pytest.mark.parametrize("creates", [True, False])
def test_the_notes_say_what_becomes_of_the_lease_and_how_long_it_may_be_held(helm, tmp_path, creates):
    account = [] if creates else ["serviceAccount.create=false", "serviceAccount.name=ours"]
    manifests = render(helm, "operator.leaseSeconds=40", *account, chart=chart_with_notes(tmp_path))
    deployment = one(manifests, "Deployment")
    env = {each["name"]: each.get("value") for each in container(manifests)["env"]}
    text = notes(manifests)
    namespace, lease = deployment["metadata"]["namespace"], env["FLEET_OPERATOR_LEASE"]
    assert (f"\n  kubectl -n {namespace} delete lease {lease}\n" in text) is not creates
    assert f"starts to work after {env['FLEET_OPERATOR_LEASE_SECONDS']} s, because another" in text
    assert env["FLEET_OPERATOR_LEASE_SECONDS"] == "40"


def reader(**selector: Any) -> dict[str, Any]:
    return {"podSelector": selector}


def expression(**fields: Any) -> dict[str, Any]:
    return reader(matchExpressions=[{"key": "app", **fields}])


def block(cidr: str, *excepted: str) -> dict[str, Any]:
    return {"ipBlock": {"cidr": cidr, **({"except": [*excepted]} if excepted else {})}}


PEERS = [
    {"namespaceSelector": {}},
    reader(matchLabels={"app": "prometheus"}),
    expression(operator="In", values=["a"]),
    expression(operator="NotIn", values=["a", "b"]),
    expression(operator="Exists"),
    expression(operator="DoesNotExist", values=[]),
    block("0.0.0.0/0", "255.255.255.255/32"),
    block("10.128.0.0/9", "10.128.4.0/22", "10.255.255.254/31"),
    block("192.168.77.13/32"),
    block("::/0", "::1/128"),
    block("fd00::/8", "fdff:ffff::/32"),
    block("2001:DB8:0:0:8000::/65", "2001:db8::c000:0:0:0/66"),
    block("1:2:3:4:5:6:7:8/128"),
    block("1:2:3:4:5:6:7::/112"),
    block("::ffff:10.0.0.0/104", "::ffff:10.1.0.0/112"),
]
NO_PEERS = [
    {},
    expression(operator="In"),
    expression(operator="NotIn", values=[]),
    expression(operator="Exists", values=["a"]),
    expression(operator="DoesNotExist", values=["a"]),
    expression(operator="Equals", values=["a"]),
    expression(operator="In", values=[1]),
    reader(matchLabels={"app": 1}),
    block("10.0.0.0"),
    block("cluster/8"),
    block("10.0.0.0/8", "10.1.0.0"),
]


@pytest.mark.parametrize(
    ("peer", "is_one"),
    [
        *(pytest.param(peer, True, id=json.dumps(peer)) for peer in PEERS),
        *(pytest.param(peer, False, id=f"not {json.dumps(peer)}") for peer in NO_PEERS),
    ],
)
def test_the_chart_refuses_what_has_not_the_form_of_a_peer_as_the_operator_does(helm, peer, is_one):
    try:
        Settings.from_environment({"FLEET_OPERATOR_METRICS_READERS": json.dumps([peer])})
        understood = True
    except SettingsError:
        understood = False
    assert understood is is_one
    sets = f"networkPolicies.metricsReaders={json.dumps([peer])}"
    ended = helm_says(helm, "template", "fleet", str(CHART), "--set-json", sets)
    assert (ended.returncode == 0) is is_one, ended.stderr
    assert is_one or "metricsReaders" in ended.stderr


def test_two_operators_work_at_the_same_time_by_default(helm):
    for values in ([], ["replicas=3"]):
        env = {each["name"]: each.get("value") for each in container(render(helm, *values))["env"]}
        assert env["FLEET_OPERATOR_LEASE"] == "fleet-fleet-operator"
    assert Settings().lease, "and outside of a chart as well"


def test_several_operators_stand_on_different_nodes_and_each_holds_the_lease_as_its_pod(helm):
    manifests = render(helm, "replicas=2")
    deployment = one(manifests, "Deployment")["spec"]
    assert deployment["replicas"] == 2
    pod = deployment["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"] == deployment["selector"]
    (identity,) = [e for e in container(manifests)["env"] if e["name"] == "FLEET_OPERATOR_IDENTITY"]
    assert identity["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        pytest.param("operator.workers=0", "workers", id="no workers"),
        pytest.param("operator.logLevel=loud", "logLevel", id="an unknown level"),
        pytest.param(f"{READER}.pods=all", "pods", id="no peer of a policy"),
        pytest.param(f"{READER}.namespaceSelector.matchLabel.a=b", "matchLabel", id="a typo in a selector"),
        pytest.param(
            f"{EXPRESSION}.key=a,{EXPRESSION}.operator=Exists,{EXPRESSION}.value=b",
            "matchExpressions",
            id="a typo deep in a selector",
        ),
        pytest.param(f"{READER}.ipBlock.cidr=10.0.0.0", "cidr", id="no network"),
        pytest.param(
            f"{READER}.ipBlock.cidr=10.0.0.0/8,{READER}.podSelector.matchLabels.a=b",
            "metricsReaders",
            id="a network and a selector in one peer",
        ),
        pytest.param("image.tga=1", "tga", id="a misspelt value"),
        pytest.param("image.digest=latest", "digest", id="no digest"),
        pytest.param("podDisruptionBudget.maxUnavailable=some", "maxUnavailable", id="no number of pods"),
    ],
)
def test_wrong_values_are_refused_by_name(helm, value, named):
    ended = helm_says(helm, "template", "fleet", str(CHART), "--set", value)
    assert ended.returncode != 0
    assert named in ended.stderr
