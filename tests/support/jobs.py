"""FleetJobs for tests: valid manifests, and a table of manifests that must be rejected.

The table applies to ``fleetjob validate`` (`fleet_operator.api.parse_job`) and to the API server: both must
reject each case and name the field. Requests to the API server have ``fieldValidation=Strict``, as kubectl's
have; otherwise the server drops unknown fields silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.manifests import Manifest, at, collective_manifest, job, manifest, template

__all__ = ["INVALID", "VALID", "InvalidCase", "collective_manifest", "job", "manifest"]


@dataclass(frozen=True)
class InvalidCase:
    """A manifest that must be rejected, and the location of the problem."""

    id: str
    manifest: Manifest
    path: str  # the field that both must name
    expected: tuple[str, ...]  # words in the message of parse_job


_CONTAINERS = "spec.template.spec.containers"
_COLLECTIVE = collective_manifest()

INVALID = (
    InvalidCase("name-too-long", manifest("d" * 49), "metadata.name", ("at most 48", "49")),
    InvalidCase("name-begins-with-a-digit", manifest("1digits"), "metadata.name", ("a letter first",)),
    InvalidCase(
        "name-with-the-end-of-its-line", manifest("digits\n"), "metadata.name", ("lower case letters",)
    ),
    InvalidCase("name-with-a-dot", manifest("digits.v2"), "metadata.name", ("lower case letters",)),
    InvalidCase("no-spec", at("spec", ...), "spec", ("nothing",)),
    InvalidCase(
        "unknown-field", at("spec.trainers", {}), "spec.trainers", ("unknown field", "did you mean trainer?")
    ),
    InvalidCase(
        "unknown-field-in-a-role",
        at("spec.trainer.replica", 3),
        "spec.trainer.replica",
        ("unknown field", "did you mean replicas?"),
    ),
    InvalidCase(
        "snake-case-field",
        at("spec.trainer.nproc_per_node", 1),
        "spec.trainer.nproc_per_node",
        ("nprocPerNode",),
    ),
    InvalidCase(
        "field-of-a-later-version",
        at("spec.telemetry", {"endpoint": "x"}),
        "spec.telemetry",
        ("unknown field",),
    ),
    InvalidCase("no-mode", at("spec.mode", ...), "spec.mode", ("nothing", "ParameterServer", "Collective")),
    InvalidCase("unknown-mode", at("spec.mode", "Gossip"), "spec.mode", ("'Gossip'", "ParameterServer")),
    InvalidCase("no-trainer", at("spec.trainer", ...), "spec.trainer", ("nothing",)),
    InvalidCase(
        "zero-trainers", at("spec.trainer.replicas", 0), "spec.trainer.replicas", ("0", "at least 1")
    ),
    InvalidCase(
        "zero-pservers", at("spec.pserver.replicas", 0), "spec.pserver.replicas", ("0", "at least 1")
    ),
    InvalidCase(
        "too-many", at("spec.trainer.replicas", 1001), "spec.trainer.replicas", ("1001", "at most 1000")
    ),
    InvalidCase(
        "too-many-servers", at("spec.pserver.replicas", 701), "spec.pserver.replicas", ("701", "at most 700")
    ),
    InvalidCase(
        "replicas-as-text",
        at("spec.trainer.replicas", "2"),
        "spec.trainer.replicas",
        ("'2'", "whole number"),
    ),
    InvalidCase(
        "replicas-as-truth", at("spec.trainer.replicas", True), "spec.trainer.replicas", ("whole number",)
    ),
    InvalidCase(
        "half-a-replica", at("spec.trainer.replicas", 1.5), "spec.trainer.replicas", ("1.5", "whole number")
    ),
    InvalidCase(
        "one-bound-without-the-other",
        at("spec.trainer.maxReplicas", 4),
        "spec.trainer.maxReplicas",
        ("together", "minReplicas"),
    ),
    InvalidCase(
        "fewer-than-the-least",
        at("spec.trainer", {"replicas": 1, "minReplicas": 2, "maxReplicas": 4}),
        "spec.trainer.replicas",
        ("from trainer.minReplicas",),
    ),
    InvalidCase(
        "more-than-the-most",
        at("spec.trainer", {"replicas": 5, "minReplicas": 2, "maxReplicas": 4}),
        "spec.trainer.replicas",
        ("to trainer.maxReplicas",),
    ),
    InvalidCase(
        "fewer-ports-than-processes-to-come",
        at(
            "spec.trainer",
            {"replicas": 1, "minReplicas": 1, "maxReplicas": 1000, "nprocPerNode": 8},
            at(
                "spec.network",
                {"hostNetwork": True, "portRange": {"first": 20000, "last": 28998}},
                _COLLECTIVE,
            ),
        ),
        "spec.network.portRange",
        ("20000 to 28998, where 9000 are needed",),
    ),
    InvalidCase("trainer-is-a-list", at("spec.trainer", [1]), "spec.trainer", ("a list of 1", "a map")),
    InvalidCase(
        "port-out-of-range", at("spec.pserver.port", 65536), "spec.pserver.port", ("65536", "at most 65535")
    ),
    InvalidCase("privileged-port", at("spec.pserver.port", 80), "spec.pserver.port", ("80", "at least 1024")),
    InvalidCase(
        "port-of-the-metrics", at("spec.pserver.port", 6180), "spec.pserver.port", ("6180", "metrics")
    ),
    InvalidCase(
        "trainer-port-of-the-metrics",
        at("spec.trainer.port", 6180),
        "spec.trainer.port",
        ("6180", "metrics"),
    ),
    InvalidCase("servers-missing", at("spec.pserver", ...), "spec.pserver", ("nothing", "ParameterServer")),
    InvalidCase(
        "collective-with-servers",
        at("spec.pserver", {}, _COLLECTIVE),
        "spec.pserver",
        ("Collective", "expected nothing"),
    ),
    InvalidCase(
        "collective-not-in-step",
        at("spec.syncMode", "Async", _COLLECTIVE),
        "spec.syncMode",
        ("'Async'", "expected Sync", "collective"),
    ),
    InvalidCase(
        "no-template", at("spec.template", ...), "spec.template", ("nothing", "each role has its own")
    ),
    InvalidCase(
        "template-for-one-role-only",
        at("spec.trainer.template", template(), at("spec.template", ...)),
        "spec.template",
        ("each role has its own",),
    ),
    InvalidCase("no-containers", at(_CONTAINERS, ...), _CONTAINERS, ("nothing",)),
    InvalidCase("empty-containers", at(_CONTAINERS, []), _CONTAINERS, ("an empty list", "at least 1")),
    InvalidCase(
        "seventeen-containers",
        at(_CONTAINERS, [{"name": f"c{i}", "image": "i"} for i in range(17)]),
        _CONTAINERS,
        ("a list of 17", "at most 16"),
    ),
    InvalidCase(
        "container-without-image", at(f"{_CONTAINERS}.0.image", ...), f"{_CONTAINERS}[0].image", ("nothing",)
    ),
    InvalidCase(
        "container-without-name", at(f"{_CONTAINERS}.0.name", ...), f"{_CONTAINERS}[0].name", ("nothing",)
    ),
    InvalidCase(
        "container-with-empty-image",
        at(f"{_CONTAINERS}.0.image", ""),
        f"{_CONTAINERS}[0].image",
        ("some text",),
    ),
    InvalidCase(
        "env-is-a-map",
        at(f"{_CONTAINERS}.0.env", {"A": "1"}),
        f"{_CONTAINERS}[0].env",
        ("a map of 1", "a list"),
    ),
    *(
        InvalidCase(
            f"limit-is-{id_}",
            at(f"{_CONTAINERS}.0.resources", {"limits": {"cpu": limit}}),
            f"{_CONTAINERS}[0].resources.limits.cpu",
            (found, "text"),
        )
        for id_, limit, found in (
            ("a-truth-value", True, "true"),
            ("a-map", {"cores": 1}, "a map of 1"),
            ("an-empty-map", {}, "an empty map"),
            ("a-list", [1], "a list of 1"),
            ("an-empty-list", [], "an empty list"),
        )
    ),
    InvalidCase(
        "restart-policy",
        at("spec.template.spec.restartPolicy", "OnFailure"),
        "spec.template.spec.restartPolicy",
        ("'Never'",),
    ),
    InvalidCase(
        "unknown-field-in-metadata",
        at("spec.template.metadata.name", "x"),
        "spec.template.metadata.name",
        ("unknown field", "labels"),
    ),
    *(
        InvalidCase(f"{id_}-in-{path.rpartition('.')[2]}", at(path, {key: value}), told, (expected,))
        for path in (
            "spec.template.metadata.labels",
            "spec.template.spec.nodeSelector",
            "spec.scheduling.nodeSelector",
        )
        for id_, key, value, told, expected in (
            ("no-label-value", "team", "computer vision", f"{path}.team", "letter or a digit first and last"),
            ("no-label-name", "team/", "vision", path, "names of labels: letters"),
            ("no-domain-of-a-label", "-a.b/team", "vision", path, "names of labels: letters"),
        )
    ),
    InvalidCase(
        "no-annotation-name",
        at("spec.template.metadata.annotations", {"a b": "any text, at any length"}),
        "spec.template.metadata.annotations",
        ("'a b'", "names of annotations: letters"),
    ),
    InvalidCase(
        "no-resource-of-a-device",
        manifest(trainer={"devices": {"resourceName": "gpu", "count": 1}}),
        "spec.trainer.devices.resourceName",
        ("'gpu'", "DOMAIN/NAME"),
    ),
    InvalidCase(
        "label-is-a-number",
        at("spec.template.metadata.labels", {"team": 7}),
        "spec.template.metadata.labels.team",
        ("7", "text"),
    ),
    InvalidCase(
        "unknown-sync-mode", at("spec.syncMode", "Eager"), "spec.syncMode", ("'Eager'", "'HalfAsync'")
    ),
    InvalidCase(
        "unknown-success-policy",
        at("spec.successPolicy", {"type": "Most"}),
        "spec.successPolicy.type",
        ("'RankZero'",),
    ),
    InvalidCase(
        "unknown-startup-policy",
        at("spec.startupPolicy", {"order": "any"}),
        "spec.startupPolicy.order",
        ("'InOrder'",),
    ),
    InvalidCase(
        "unknown-failure-action",
        at("spec.failurePolicy.action", "Ignore"),
        "spec.failurePolicy.action",
        ("'FailJob'",),
    ),
    InvalidCase(
        "collective-restarts-one-replica",
        at("spec.failurePolicy.action", "RestartReplica", _COLLECTIVE),
        "spec.failurePolicy.action",
        ("RestartJob", "collective"),
    ),
    InvalidCase(
        "rule-without-an-action",
        at(
            "spec.failurePolicy.rules",
            [{"name": "codes-x", "onExitCodes": {"operator": "In", "values": [1]}}],
        ),
        "spec.failurePolicy.rules[0].action",
        ("the reaction",),
    ),
    InvalidCase(
        "rule-that-matches-everything",
        at("spec.failurePolicy.rules", [{"name": "all", "action": "Ignore"}]),
        "spec.failurePolicy.rules",
        ("onExitCodes, onReasons, onMessagePatterns or role",),
    ),
    InvalidCase(
        "rules-with-one-name",
        at(
            "spec.failurePolicy.rules",
            [{"name": "a", "role": role, "action": "Ignore"} for role in ("pserver", "trainer")],
        ),
        "spec.failurePolicy.rules",
        ("several rules named a", "different names"),
    ),
    InvalidCase(
        "rule-without-a-name",
        at("spec.failurePolicy.rules", [{"role": "trainer", "action": "Ignore"}]),
        "spec.failurePolicy.rules[0].name",
        ("the name of the rule",),
    ),
    InvalidCase(
        "budget-for-more-servers-than-there-are",
        at("spec.pserver.disruptionBudget", {"minAvailable": 3}),
        "spec.pserver.disruptionBudget.minAvailable",
        ("3", "at most as many servers"),
    ),
    InvalidCase(
        "rule-about-exit-code-zero",
        at(
            "spec.failurePolicy.rules",
            [{"name": "codes-ignore", "onExitCodes": {"operator": "In", "values": [0]}, "action": "Ignore"}],
        ),
        "spec.failurePolicy.rules[0].onExitCodes.values[0]",
        ("at least 1",),
    ),
    InvalidCase(
        "rule-about-another-role",
        at("spec.failurePolicy.rules", [{"name": "worker-ignore", "role": "worker", "action": "Ignore"}]),
        "spec.failurePolicy.rules[0].role",
        ("'pserver'",),
    ),
    InvalidCase(
        "collective-rule-restarts-one-replica",
        at(
            "spec.failurePolicy.rules",
            [
                {
                    "name": "codes-restartreplica",
                    "onExitCodes": {"operator": "In", "values": [1]},
                    "action": "RestartReplica",
                }
            ],
            _COLLECTIVE,
        ),
        "spec.failurePolicy.rules",
        ("RestartJob", "collective"),
    ),
    InvalidCase(
        "negative-backoff",
        at("spec.runPolicy.backoffLimit", -1),
        "spec.runPolicy.backoffLimit",
        ("at least 0",),
    ),
    InvalidCase("suspend-as-text", at("spec.suspend", "yes"), "spec.suspend", ("true or false",)),
    InvalidCase(
        "deadline-of-nothing",
        at("spec.runPolicy.activeDeadlineSeconds", 0),
        "spec.runPolicy.activeDeadlineSeconds",
        ("at least 1",),
    ),
    InvalidCase(
        "negative-ttl",
        at("spec.runPolicy.ttlSecondsAfterFinished", -5),
        "spec.runPolicy.ttlSecondsAfterFinished",
        ("at least 0",),
    ),
    InvalidCase(
        "pending-deadline-of-nothing",
        at("spec.runPolicy.pendingDeadlineSeconds", 0),
        "spec.runPolicy.pendingDeadlineSeconds",
        ("at least 1",),
    ),
    InvalidCase(
        "managed-by-a-bare-name",
        at("spec.managedBy", "kueue"),
        "spec.managedBy",
        ("'kueue'", "domain/name"),
    ),
    InvalidCase(
        "managed-by-a-name-with-the-end-of-its-line",
        at("spec.managedBy", "a.b/c\n"),
        "spec.managedBy",
        (r"'a.b/c\n'", "domain/name"),
    ),
    InvalidCase(
        "unknown-clean-policy",
        at("spec.runPolicy.cleanPodPolicy", "Completed"),
        "spec.runPolicy.cleanPodPolicy",
        ("'All'",),
    ),
    InvalidCase(
        "processes-with-servers",
        at("spec.trainer.nprocPerNode", 2),
        "spec.trainer.nprocPerNode",
        ("ParameterServer",),
    ),
    InvalidCase(
        "zero-processes",
        at("spec.trainer.nprocPerNode", 0, _COLLECTIVE),
        "spec.trainer.nprocPerNode",
        ("at least 1",),
    ),
    InvalidCase(
        "processes-beyond-the-last-port",
        at("spec.trainer", {"port": 65530, "nprocPerNode": 8}, _COLLECTIVE),
        "spec.trainer.port",
        ("65530", "8 processes"),
    ),
    InvalidCase(
        "no-device",
        at("spec.trainer.devices", {"count": 0}),
        "spec.trainer.devices.count",
        ("at least 1",),
    ),
    InvalidCase(
        "shared-memory-with-a-blank",
        at("spec.trainer.sharedMemory", "2 Gi"),
        "spec.trainer.sharedMemory",
        ("'2 Gi'",),
    ),
    InvalidCase(
        "host-network-without-a-range",
        at("spec.network", {"hostNetwork": True}),
        "spec.network.portRange",
        ("nothing", "share its ports"),
    ),
    InvalidCase(
        "range-of-too-few-ports",
        at("spec.network", {"hostNetwork": True, "portRange": {"first": 20000, "last": 20006}}),
        "spec.network.portRange",
        ("20000 to 20006", "8 are needed"),
    ),
    InvalidCase(
        "range-of-privileged-ports",
        at("spec.network", {"hostNetwork": True, "portRange": {"first": 80, "last": 20006}}),
        "spec.network.portRange.first",
        ("at least 1024",),
    ),
    InvalidCase(
        "tls-without-a-secret",
        at("spec.network", {"tls": {}}),
        "spec.network.tls.secretName",
        ("nothing", "a Secret in the job's namespace"),
    ),
    InvalidCase(
        "tls-with-no-name-of-a-secret",
        at("spec.network", {"tls": {"secretName": "Digits_tls"}}),
        "spec.network.tls.secretName",
        ("'Digits_tls'", "lower case letters, digits, '-' and '.'"),
    ),
    InvalidCase(
        "tls-with-a-wildcard-for-a-name",
        at("spec.network", {"tls": {"secretName": "digits-tls", "serverName": "*.digits"}}),
        "spec.network.tls.serverName",
        ("'*.digits'", "lower case letters, digits, '-' and '.'"),
    ),
    InvalidCase(
        "collective-with-tls",
        at("spec.network", {"tls": {"secretName": "digits-tls"}}, _COLLECTIVE),
        "spec.network.tls",
        ("the Secret digits-tls", "do not support TLS", "WireGuard"),
    ),
    InvalidCase(
        "host-network-in-a-template",
        at("spec.template.spec.hostNetwork", True),
        "spec.network.hostNetwork",
        ("in a template", "portRange"),
    ),
    InvalidCase(
        "priority-without-a-name",
        at("spec.scheduling", {"priorityClassName": ""}),
        "spec.scheduling.priorityClassName",
        ("some text",),
    ),
    InvalidCase(
        "kueue-without-a-queue",
        at("spec.podGroupPolicy", {"kueue": {}}),
        "spec.podGroupPolicy.kueue.queueName",
        ("nothing", "a LocalQueue"),
    ),
    InvalidCase(
        "no-pod-group",
        at("spec.podGroupPolicy", {}),
        "spec.podGroupPolicy",
        ("none of them", "exactly one of kueue, coscheduling and volcano"),
    ),
    InvalidCase(
        "two-pod-groups",
        at("spec.podGroupPolicy", {"kueue": {"queueName": "research"}, "volcano": {}}),
        "spec.podGroupPolicy",
        ("kueue and volcano", "exactly one"),
    ),
    *(
        InvalidCase(
            f"pod-group-of-{gang}-larger-than-the-job",
            at("spec.podGroupPolicy", {gang: {"minMember": 5}}),
            f"spec.podGroupPolicy.{gang}.minMember",
            ("5", "at most"),
        )
        for gang in ("coscheduling", "volcano")
    ),
    InvalidCase(
        "unknown-pod-group",
        at("spec.podGroupPolicy", {"yunikorn": {}}),
        "spec.podGroupPolicy.yunikorn",
        ("volcano",),
    ),
    InvalidCase(
        "checkpoint-of-nothing", at("spec.checkpoint", {}), "spec.checkpoint", ("claimName", "neither")
    ),
    InvalidCase(
        "checkpoint-of-two",
        at("spec.checkpoint", {"claimName": "a", "volumeClaimTemplate": {"spec": {}}}),
        "spec.checkpoint",
        ("claimName", "both"),
    ),
    InvalidCase(
        "checkpoint-at-no-path",
        at("spec.checkpoint", {"claimName": "a", "mountPath": "state"}),
        "spec.checkpoint.mountPath",
        ("'state'",),
    ),
    InvalidCase(
        "a-claim-for-each-server-without-servers",
        at("spec.checkpoint", {"claimName": "a", "scope": "Pserver"}, _COLLECTIVE),
        "spec.checkpoint.scope",
        ("'Pserver'", "Job"),
    ),
    InvalidCase(
        "node-selector-is-a-list",
        at("spec.scheduling.nodeSelector", ["gpu"]),
        "spec.scheduling.nodeSelector",
        ("a map",),
    ),
)

VALID = {
    "parameter-server": manifest(),
    "collective": _COLLECTIVE,
    "one-of-each-by-default": manifest("a", pserver={}, trainer={}),
    "resizable": manifest(syncMode="Async", trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 8}),
    "beside-its-pods": manifest(
        pserver={"replicas": 2, "disruptionBudget": {}},
        podGroupPolicy={"volcano": {"queue": "research", "minMember": 4}},
        network={"policy": {"type": "Isolated"}},
        checkpoint={
            "volumeClaimTemplate": {
                "metadata": {"labels": {"team": "vision"}},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
            },
            "retention": "Delete",
        },
    ),
    "with-the-claims-of-an-earlier-job": manifest(
        checkpoint={"claimName": "digits-checkpoint-1a2b3c4d", "scope": "Pserver"}
    ),
    "encrypting": manifest(network={"tls": {"secretName": "digits-tls", "serverName": "digits"}}),
    "longest-name": manifest("d" * 48),
    "most-replicas": manifest(pserver={"replicas": 700}, trainer={"replicas": 1000}),
    "most-processes": collective_manifest(trainer={"replicas": 1000, "nprocPerNode": 8}),
    "most-processes-on-their-nodes-network": collective_manifest(
        trainer={"replicas": 1000, "nprocPerNode": 8},
        network={"hostNetwork": True, "portRange": {"first": 20000, "last": 28999}},
    ),
    "fields-left-empty": manifest(syncMode=None, runPolicy=None, scheduling=None, pserver={"replicas": None}),
    "a-template-per-role": at(
        "spec.template", ..., manifest(pserver={"template": template()}, trainer={"template": template()})
    ),
    "template-with-everything": manifest(
        template={
            "metadata": {
                "labels": {"team": "vision", "app.kubernetes.io/Part_of": "", "v": "1.0_rc-1"},
                "annotations": {"note": "a" * 300, "Example.com/note": "b c"},
            },
            **template(
                restartPolicy="Never",
                nodeSelector={"node.kubernetes.io/instance-type": "p5.48xlarge"},
                serviceAccountName="trainer",
                initContainers=[{"name": "data", "image": "example.com/data:1"}],
                volumes=[{"name": "data", "emptyDir": {}}],
                affinity={"podAntiAffinity": {}},
            ),
        }
    ),
    "half-a-core": at(
        f"{_CONTAINERS}.0.resources",
        {
            "limits": {"cpu": 0.5, "memory": "1Gi", "example.com/nic": 1, "hugepages-2Mi": "64Mi"},
            "requests": {"cpu": 0.5, "ephemeral-storage": "1Gi"},
        },
    ),
    "all-policies": manifest(
        syncMode="Sync",
        failurePolicy={
            "action": "FailJob",
            "rules": [
                {
                    "name": "trainer-restartreplica",
                    "role": "trainer",
                    "onExitCodes": {"operator": "In", "values": [42, 137]},
                    "action": "RestartReplica",
                },
                {"name": "reasons-restartjob", "onReasons": ["OOMKilled"], "action": "RestartJob"},
                {"name": "pserver-ignore", "role": "pserver", "action": "Ignore"},
            ],
        },
        successPolicy={"type": "RankZero"},
        startupPolicy={"order": "AnyOrder"},
        suspend=True,
        managedBy="kueue.x-k8s.io/multikueue",
        runPolicy={
            "backoffLimit": 0,
            "activeDeadlineSeconds": 3600,
            "pendingDeadlineSeconds": 600,
            "ttlSecondsAfterFinished": 0,
            "cleanPodPolicy": "None",
        },
    ),
    "collective-on-gpus": collective_manifest(
        trainers=4,
        trainer={"replicas": 4, "port": 29500, "devices": {"count": 8}, "sharedMemory": "2Gi"},
        failurePolicy={"action": "RestartJob"},
        scheduling={
            "nodeSelector": {"accelerator": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "priorityClassName": "training",
        },
        podGroupPolicy={"coscheduling": {"scheduleTimeoutSeconds": 60}},
        network={"hostNetwork": True, "portRange": {"first": 20000, "last": 20035}},
    ),
}
