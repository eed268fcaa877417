"""Where a pod runs and what it gets of its node."""

import pytest

from fleet_operator.api import Role
from tests.support import jobs
from tests.support.pods import Manifest, env_of, main_of, pod_of, template

NODES = {"nodeSelector": {"accelerator": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
GPUS = {"replicas": 2, "devices": {"count": 8}, "sharedMemory": "2Gi"}
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
CLAIM = {"resources": {"claims": [{"name": "gpu"}]}}


def test_a_trainer_gets_its_share_of_its_node():
    spec = pod_of(
        scheduling=NODES,
        trainer=GPUS,
        template=template(
            {"resources": {"limits": {"cpu": "4"}}},
            nodeSelector={"zone": "a"},
            tolerations=[{"key": "spot"}],
            volumes=[{"name": "data", "emptyDir": {}}],
        ),
    )["spec"]
    assert spec["nodeSelector"] == {"zone": "a", "accelerator": "h100"}
    assert spec["tolerations"] == [{"key": "spot"}, {"key": "gpu", "operator": "Exists"}]
    assert spec["containers"][0]["resources"] == {"limits": {"cpu": "4", "nvidia.com/gpu": 8}}
    assert spec["volumes"][1:] == [
        {"name": "fleet-shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    ]
    [mount] = spec["containers"][0]["volumeMounts"]
    assert mount == {"name": "fleet-shared-memory", "mountPath": "/dev/shm"}  # noqa: S108  not a temporary file


def test_collectives_say_what_goes_wrong_unless_the_template_says_otherwise():
    asked = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    values = [env_of(main_of(pod_of(trainer=GPUS, template=each))) for each in (template(), template(asked))]
    assert [each["NCCL_DEBUG"] for each in values] == ["WARN", "INFO"]
    assert "NCCL_DEBUG" not in env_of(main_of(pod_of()))
    assert "NCCL_DEBUG" not in env_of(main_of(pod_of(Role.PSERVER, template=template(GPU))))


def test_torch_writes_down_which_collectives_came_before_one_that_timed_out():
    recorder = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    kept = {"TORCH_FR_DUMP_TEMP_FILE": "/state/nccl_trace_rank_"}
    plain = jobs.collective_manifest(trainer=GPUS)
    checkpoint = {"claimName": "state", "mountPath": "/state"}
    saving = jobs.collective_manifest(trainer=GPUS, checkpoint=checkpoint)
    asking = [jobs.collective_manifest(template=template(each)) for each in (GPU, CLAIM)]
    for document, expected in (*((each, recorder) for each in (plain, *asking)), (saving, recorder | kept)):
        env = env_of(main_of(pod_of(document=document)))
        assert {name: env[name] for name in env if name.startswith("TORCH_")} == expected
    assert "TORCH_FR_BUFFER_SIZE" not in env_of(main_of(pod_of(trainer=GPUS)))


def test_shared_memory_of_the_template_wins():
    own = {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108  not a temporary file
    spec = pod_of(
        trainer=GPUS,
        template=template({"volumeMounts": [own]}, volumes=[{"name": "shm", "emptyDir": {}}]),
    )["spec"]
    assert spec["volumes"] == [{"name": "shm", "emptyDir": {}}]
    assert spec["containers"][0]["volumeMounts"] == [own]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(jobs.manifest(trainer={"devices": {"count": 1}}), {}, id="gpus-of-the-job"),
        pytest.param(jobs.manifest(template=template(GPU)), {}, id="gpus-of-the-template"),
        pytest.param(jobs.manifest(template=template(CLAIM)), {}, id="devices-of-a-claim"),
        pytest.param(jobs.collective_manifest(trainer={"nprocPerNode": 2}), {}, id="several-processes"),
        pytest.param(jobs.manifest(trainer={"sharedMemory": "1Gi"}), {"sizeLimit": "1Gi"}, id="asked-for"),
        pytest.param(
            jobs.manifest(trainer={"devices": {"count": 1}, "sharedMemory": "1Gi"}),
            {"sizeLimit": "1Gi"},
            id="gpus-and-a-size",
        ),
        pytest.param(jobs.manifest(), None, id="one-process-on-the-cpu"),
        pytest.param(jobs.collective_manifest(trainer={"nprocPerNode": 1}), None, id="one-process"),
        pytest.param(
            jobs.manifest(template=template({"resources": {"limits": {"cpu": "4", "nvidia.com/gpu": 0}}})),
            None,
            id="no-device",
        ),
        pytest.param(
            jobs.manifest(trainer={"devices": {"count": 1}, "sharedMemory": "0Gi"}), None, id="refused"
        ),
        pytest.param(
            jobs.collective_manifest(
                trainer={"nprocPerNode": 2},
                template=template(
                    {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}]},  # noqa: S108  not a temporary file
                    volumes=[{"name": "shm", "emptyDir": {}}],
                ),
            ),
            None,
            id="the-templates-own",
        ),
    ],
)
def test_memory_is_shared_where_processes_and_devices_need_it(document, expected):
    spec = pod_of(document=document)["spec"]
    volumes = [each["emptyDir"] for each in spec.get("volumes", []) if each["name"] == "fleet-shared-memory"]
    assert volumes == ([] if expected is None else [{"medium": "Memory", **expected}])
    mounts = main_of({"spec": spec}).get("volumeMounts", [])
    assert ("fleet-shared-memory" in {each["name"] for each in mounts}) == (expected is not None)


def test_a_path_that_is_no_text_is_left_to_the_api_server():
    mounts = [{"name": "a", "mountPath": 5}, {"name": "b"}]
    spec = pod_of(template=template({"volumeMounts": mounts}))["spec"]
    assert spec["containers"][0]["volumeMounts"] == mounts


def test_a_server_runs_on_the_same_nodes_but_takes_no_device():
    spec = pod_of(Role.PSERVER, scheduling=NODES, trainer=GPUS)["spec"]
    assert spec["nodeSelector"] == {"accelerator": "h100"}
    assert "resources" not in spec["containers"][0]
    assert "volumes" not in spec


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param({}, "training", id="the-jobs"),
        pytest.param({"priorityClassName": "mine"}, "mine", id="own"),
    ],
)
def test_priority(own, expected):
    for role in Role:
        spec = pod_of(role, scheduling={"priorityClassName": "training"}, template=template(**own))["spec"]
        assert spec["priorityClassName"] == expected


HOST = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20999}}


def test_pods_on_their_nodes_network_still_know_the_clusters_names():
    spec = pod_of(network=HOST)["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod_of(network=HOST, template=template(dnsPolicy="None"))["spec"]["dnsPolicy"] == "None"
    assert "hostNetwork" not in pod_of()["spec"]


def test_collective_trainers_on_their_nodes_network_are_told_their_address():
    def told(document: Manifest) -> list[Manifest]:
        return [
            entry for entry in main_of(pod_of(document=document))["env"] if entry["name"] == "FLEET_POD_IP"
        ]

    by_field = {"name": "FLEET_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    own = {"name": "FLEET_POD_IP", "value": "10.0.0.7"}
    assert told(jobs.collective_manifest(network=HOST)) == [by_field]
    assert told(jobs.collective_manifest(network=HOST, template=template({"env": [own]}))) == [own]
    assert told(jobs.collective_manifest()) == told(jobs.manifest(network=HOST)) == []


def test_the_scheduler_is_told_every_port_that_is_taken_on_a_node():
    document = jobs.collective_manifest(network=HOST, trainer={"nprocPerNode": 3})
    ports = main_of(pod_of(document=document))["ports"]
    numbers = [each["containerPort"] for each in ports]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    server = pod_of(Role.PSERVER, network=HOST)
    assert main_of(server)["readinessProbe"]["grpc"]["port"] == main_of(server)["ports"][0]["containerPort"]
