"""One replica's pod: the user's template with the replica's place filled in."""

import pytest

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts, build_pod, role_env
from fleet_operator.plan.model import Attempt
from tests.support import jobs
from tests.support.pods import env_of, main_of, pod_of, template


def test_a_whole_pod():
    job = jobs.job()
    env = role_env(job, Role.PSERVER, 1, ClusterHosts(job), restarts=3)
    assert build_pod(job, Role.PSERVER, 1, Attempt(1, 2), ClusterHosts(job)) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "digits-pserver-1",
            "namespace": "default",
            "labels": {
                "app.kubernetes.io/managed-by": "fleet-operator",
                "fleetjob.dev/job-name": "digits",
                "fleetjob.dev/role": "pserver",
                "fleetjob.dev/index": "1",
                "fleetjob.dev/attempt": "1.2",
            },
            "annotations": {"kubectl.kubernetes.io/default-container": "fleet"},
            "ownerReferences": [
                {
                    "apiVersion": "fleetjob.dev/v1alpha1",
                    "kind": "FleetJob",
                    "name": "digits",
                    "uid": "11111111-1111-4111-8111-111111111111",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "hostname": "digits-pserver-1",
            "subdomain": "digits",
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [
                {
                    "name": "fleet",
                    "image": "example.com/trainer:1",
                    "command": ["python", "train.py"],
                    "env": [{"name": name, "value": value} for name, value in env.items()],
                    "ports": [
                        {"name": "pserver", "containerPort": 6174, "protocol": "TCP"},
                        {"name": "metrics", "containerPort": 6180, "protocol": "TCP"},
                    ],
                    "readinessProbe": {"grpc": {"port": 6174}, "periodSeconds": 2, "timeoutSeconds": 2},
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
        },
    }


@pytest.mark.parametrize(
    ("tls", "told"),
    [
        pytest.param({"secretName": "digits-tls"}, {"FLEET_TLS_DIR": "/etc/fleet/tls"}, id="by-its-host"),
        pytest.param(
            {"secretName": "digits-tls", "serverName": "digits"},
            {"FLEET_TLS_DIR": "/etc/fleet/tls", "FLEET_TLS_SERVER_NAME": "digits"},
            id="by-one-name",
        ),
    ],
)
@pytest.mark.parametrize("role", Role)
def test_certificates_are_mounted_in_the_main_container_and_nothing_else_changes(role, tls, told):
    containers = {
        "template": template({}, {"name": "sidecar"}, initContainers=[{"name": "init", "image": "i"}])
    }
    plain = pod_of(role, **containers)
    pod = pod_of(role, network={"tls": tls}, **containers)
    secret = {"secretName": "digits-tls", "defaultMode": 0o444}
    assert pod["spec"].pop("volumes") == [{"name": "fleet-tls", "secret": secret}]
    main = main_of(pod)
    assert main.pop("volumeMounts") == [
        {"name": "fleet-tls", "mountPath": "/etc/fleet/tls", "readOnly": True}
    ]
    names = {entry["name"]: entry["value"] for entry in main["env"] if entry["name"].startswith("FLEET_TLS")}
    assert names == told
    main["env"] = [entry for entry in main["env"] if entry["name"] not in told]
    if role is Role.PSERVER:
        probe = {"httpGet": {"path": "/readyz", "port": 6180}, "periodSeconds": 2, "timeoutSeconds": 2}
        assert main["readinessProbe"] == probe
        main["readinessProbe"] = main_of(plain)["readinessProbe"]
    assert pod == plain


def test_what_the_operator_sets_wins():
    pod = pod_of(
        template=template(
            metadata={"labels": {"fleetjob.dev/index": "9", "team": "vision"}, "annotations": {"a": "b"}},
            restartPolicy="Never",
            hostname="other",
            subdomain="other",
        )
    )
    assert pod["metadata"]["labels"]["fleetjob.dev/index"] == "0"
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["metadata"]["annotations"] == {"a": "b", "kubectl.kubernetes.io/default-container": "fleet"}
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("digits-trainer-0", "digits")


def test_what_the_template_says_beside_is_kept():
    pod = pod_of(
        Role.PSERVER,
        template=template(
            {
                "readinessProbe": {"exec": {"command": ["true"]}},
                "terminationMessagePolicy": "File",
                "ports": [{"name": "mine", "containerPort": 6174}],
                "securityContext": {"runAsNonRoot": True},
            },
            automountServiceAccountToken=True,
            enableServiceLinks=True,
            schedulerName="volcano",
        ),
    )
    container = main_of(pod)
    assert container["readinessProbe"] == {"exec": {"command": ["true"]}}
    assert container["terminationMessagePolicy"] == "File"
    assert container["ports"] == [
        {"name": "mine", "containerPort": 6174},
        {"name": "metrics", "containerPort": 6180, "protocol": "TCP"},
    ]
    assert container["securityContext"] == {"runAsNonRoot": True}
    assert pod["spec"]["automountServiceAccountToken"] is True
    assert pod["spec"]["enableServiceLinks"] is True
    assert pod["spec"]["schedulerName"] == "volcano"


def test_every_container_gets_the_role_environment_before_its_own_which_may_refer_to_it():
    shard = {"name": "SHARD", "value": "part-$(PADDLE_TRAINER_ID)"}
    pod = pod_of(
        template=template(
            {"env": [shard, {"name": "POD_IP", "value": "mine"}]},
            {"name": "sidecar"},
            initContainers=[{"name": "data", "image": "example.com/data:1"}],
        )
    )
    main, sidecar = pod["spec"]["containers"]
    assert main["env"][-1] == shard
    assert [each["name"] for each in main["env"]].count("POD_IP") == 1
    assert env_of(main)["POD_IP"] == "digits-trainer-0.digits.default.svc"
    for container in (sidecar, pod["spec"]["initContainers"][0]):
        assert env_of(container)["PADDLE_TRAINER_ID"] == "0"


def test_a_variable_from_a_field_is_kept():
    field = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert main_of(pod_of(template=template({"env": [field]})))["env"][-1] == field


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        pytest.param(({"name": "a"}, {"name": "fleet"}), "fleet", id="the-one-named-fleet"),
        pytest.param(({"name": "a"}, {"name": "b"}), "a", id="else-the-first"),
    ],
)
def test_only_the_main_container_has_ports_and_a_probe(containers, expected):
    pod = pod_of(Role.PSERVER, template=template(*containers))
    assert [each["name"] for each in pod["spec"]["containers"] if "readinessProbe" in each] == [expected]
    assert [each["name"] for each in pod["spec"]["containers"] if "ports" in each] == [expected]


def test_a_trainer_of_a_parameter_server_job_listens_for_metrics_only():
    container = main_of(pod_of())
    assert [each["name"] for each in container["ports"]] == ["metrics"]
    assert "readinessProbe" not in container


def test_a_trainer_of_a_collective_job_listens_for_its_peers():
    container = main_of(pod_of(document=jobs.collective_manifest()))
    assert [each["containerPort"] for each in container["ports"]] == [6175, 6180]


def test_a_roles_own_template_replaces_the_shared_one():
    own = template({"image": "example.com/server:1"})
    pod = pod_of(Role.PSERVER, pserver={"template": own})
    assert main_of(pod)["image"] == "example.com/server:1"
    assert main_of(pod_of(Role.TRAINER, pserver={"template": own}))["image"] == "example.com/trainer:1"


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        pytest.param("4", "4", id="whole-cores"),
        pytest.param(4, "4", id="as-a-number"),
        pytest.param("2500m", "3", id="rounded-up"),
        pytest.param("100m", "1", id="at-least-one"),
        pytest.param("0.5", "1", id="half-a-core"),
        pytest.param(0.5, "1", id="half-a-core-as-a-number"),
        pytest.param("1e9999", None, id="more-than-any-node-has"),
        pytest.param("1e9999999", None, id="more-than-can-be-reckoned-with"),
        pytest.param("4e0", "4", id="with-an-exponent"),
        pytest.param("many", None, id="what-the-api-server-will-refuse"),
        pytest.param(None, None, id="without-a-limit"),
    ],
)
def test_threads_follow_the_cpu_limit(cpu, expected):
    resources = {"resources": {"limits": {"cpu": cpu}}} if cpu is not None else {}
    assert env_of(main_of(pod_of(template=template(resources)))).get("OMP_NUM_THREADS") == expected


def test_threads_of_the_template_win():
    own = {"env": [{"name": "OMP_NUM_THREADS", "value": "7"}], "resources": {"limits": {"cpu": "2"}}}
    assert env_of(main_of(pod_of(template=template(own))))["OMP_NUM_THREADS"] == "7"


def test_the_processes_of_a_pod_share_its_cores():
    document = jobs.collective_manifest(
        trainer={"nprocPerNode": 4}, template=template({"resources": {"limits": {"cpu": "10"}}})
    )
    assert env_of(main_of(pod_of(document=document)))["OMP_NUM_THREADS"] == "3"


NODES = {"tolerations": [{"key": "gpu", "operator": "Exists"}]}


def test_building_changes_nothing_in_the_job():
    job = jobs.job(jobs.manifest(scheduling=NODES))
    first = build_pod(job, Role.TRAINER, 0, Attempt(), ClusterHosts(job))
    first["spec"]["tolerations"][0]["key"] = "changed"
    first["spec"]["containers"][0]["command"].append("changed")
    again = build_pod(job, Role.TRAINER, 0, Attempt(), ClusterHosts(job))
    assert again["spec"]["tolerations"] == NODES["tolerations"]
    assert again["spec"]["containers"][0]["command"] == ["python", "train.py"]


def test_what_a_namespace_gives_its_pods_passes_through():
    spec = pod_of(
        template=template(
            imagePullSecrets=[{"name": "registry"}],
            serviceAccountName="trainer",
            initContainers=[{"name": "proxy", "image": "example.com/proxy:1", "restartPolicy": "Always"}],
        )
    )["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["serviceAccountName"] == "trainer"
    assert spec["automountServiceAccountToken"] is False
    assert spec["initContainers"][0]["restartPolicy"] == "Always"
