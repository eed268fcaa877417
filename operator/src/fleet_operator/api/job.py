"""The FleetJob spec as immutable types: the fields that users may set, and their defaults.

The CustomResourceDefinition is generated from these models (`fleet_operator.api.crd`), so every field here is
implemented. `fleet_operator.api.rules` has the rules that involve several fields.
"""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StringConstraints

from fleet_operator.api.base import (
    MAX_SECONDS,
    Annotations,
    Labels,
    Model,
    NonEmpty,
    OpenModel,
    Port,
    Quantity,
    Seconds,
    Servers,
    Trainers,
)
from fleet_operator.api.names import CONTROLLER, LABEL_QUEUE, MAIN_CONTAINER, Role, gang_name
from fleet_operator.api.placement import Devices, Gang, Network, PodGroupPolicy, PortRange, Scheduling, Tls
from fleet_operator.api.status import FleetJobStatus, JobState

__all__ = [
    "Checkpoint",
    "CheckpointScope",
    "CleanPodPolicy",
    "Container",
    "DisruptionBudget",
    "ExitCodeOperator",
    "ExitCodes",
    "FailureAction",
    "FailurePolicy",
    "FailureRule",
    "FleetJob",
    "FleetJobSpec",
    "Mode",
    "ObjectMeta",
    "PodSpec",
    "PodTemplate",
    "PserverSpec",
    "Retention",
    "RuleAction",
    "RunPolicy",
    "StartupOrder",
    "StartupPolicy",
    "SuccessPolicy",
    "SuccessPolicyType",
    "SyncMode",
    "TrainerSpec",
    "VolumeClaimTemplate",
]

ExitCode = Annotated[StrictInt, Field(ge=1, le=255)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=63)]
RuleName = Annotated[
    str, StringConstraints(max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class FailureAction(StrEnum):
    """The reaction to a failed replica."""

    RESTART_REPLICA = "RestartReplica"
    RESTART_JOB = "RestartJob"
    FAIL_JOB = "FailJob"


class RuleAction(StrEnum):
    """The reaction to a failure that a rule matches."""

    RESTART_REPLICA = "RestartReplica"
    RESTART_JOB = "RestartJob"
    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"


class ExitCodeOperator(StrEnum):
    """Whether a rule matches the listed exit codes, or all others."""

    IN = "In"
    NOT_IN = "NotIn"


class ExitCodes(Model):
    """A set of exit codes of the main container, as in a Job's podFailurePolicy."""

    operator: ExitCodeOperator = Field(description="In: one of the values. NotIn: any other code but 0.")
    values: Annotated[tuple[ExitCode, ...], Field(min_length=1, max_length=64)] = Field(
        description="The exit codes."
    )

    def has(self, exit_code: int | None) -> bool:
        """Return whether an exit code matches; None, which means no exit code, never matches."""
        return exit_code is not None and (exit_code in self.values) is (self.operator is ExitCodeOperator.IN)


class FailureRule(Model):
    """An exception to the failure policy, for failures that match all of its criteria."""

    name: RuleName = Field(description="The name of the rule in messages, unique in the list.")
    role: Role | None = Field(default=None, description="Only replicas of this role.")
    on_exit_codes: ExitCodes | None = Field(
        default=None, description="Only some exit codes of the main container."
    )
    on_reasons: Annotated[tuple[Reason, ...], Field(min_length=1, max_length=16)] | None = Field(
        default=None,
        description="Only these reasons of a pod or container, such as OOMKilled, StartError, Evicted.",
    )
    on_message_patterns: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=16)] | None = Field(
        default=None,
        description="Only if a line of the termination message, or of the end of the log that replaces a "
        "missing one, contains one of these patterns, in which * matches any text: CUDA error*ECC.",
    )
    action: RuleAction = Field(
        description="The reaction. Ignore: the replica is restarted, and this does not count as a failure."
    )


class FailurePolicy(Model):
    """The reaction to failed replicas."""

    action: FailureAction | None = Field(
        default=None, description="Default: RestartReplica in mode ParameterServer, RestartJob in Collective."
    )
    disruption_limit: Annotated[StrictInt, Field(ge=0, le=MAX_SECONDS)] | None = Field(
        default=None,
        description="The number of disruptions after which pods are replaced; one more fails the job."
        " Disruptions within 60 s of each other count once, and ignored ones do not count. Default: no "
        "limit.",
    )
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=20)] = Field(
        default=(), description="Exceptions to action. The first rule that matches a failure applies."
    )


class CheckpointScope(StrEnum):
    """The pods that share a checkpoint volume."""

    JOB = "Job"
    PSERVER = "Pserver"


class Retention(StrEnum):
    """Whether a claim is kept when its job is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class ClaimMetadata(Model):
    """Additional metadata of a template's claims."""

    labels: Labels | None = Field(default=None, description="Labels in addition to the operator's own.")
    annotations: Annotations | None = Field(default=None, description="Annotations of the claims.")


class ClaimSpec(OpenModel):
    """The spec of a PersistentVolumeClaim."""

    storage_class_name: str | None = Field(
        default=None, description="The storage class. Default: the cluster's."
    )


class VolumeClaimTemplate(Model):
    """A template for PersistentVolumeClaims."""

    metadata: ClaimMetadata | None = Field(default=None, description="Labels and annotations of the claims.")
    spec: ClaimSpec = Field(description="The spec of a PersistentVolumeClaim, as in Kubernetes.")


class Checkpoint(Model):
    """A volume for checkpoints, which outlives the pods."""

    mount_path: Annotated[str, StringConstraints(pattern="^/[^:]+$", max_length=255)] = Field(
        default="/checkpoint", description="The mount path of the volume; also FLEET_CHECKPOINT_DIR."
    )
    claim_name: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="An existing PersistentVolumeClaim, for all pods of the job. With scope"
        " Pserver, the servers mount CLAIMNAME-pserver-0 and so on, such as the claims of an earlier job.",
    )
    volume_claim_template: VolumeClaimTemplate | None = Field(
        default=None,
        description="Creates claims for the job: NAME-checkpoint-UID, with eight digits of the job's uid, or"
        " with scope Pserver NAME-checkpoint-UID-pserver-0 and so on.",
    )
    scope: CheckpointScope | None = Field(
        default=None,
        description="Job: one claim, mounted by all pods. Pserver: one claim for each parameter server, "
        "mounted only by that server. Default: Pserver with a volumeClaimTemplate in mode ParameterServer, "
        "else Job.",
    )
    retention: Retention = Field(
        default=Retention.RETAIN,
        description="Whether claims made from the template outlive the job. A later job, even of the same"
        " name, uses them only if its claimName names them.",
    )


START_DEADLINE_SECONDS = 3600
"""How long replicas wait for others to start if runPolicy.pendingDeadlineSeconds is not set."""


class Mode(StrEnum):
    """How the replicas train together."""

    PARAMETER_SERVER = "ParameterServer"
    COLLECTIVE = "Collective"


class SyncMode(StrEnum):
    """When a parameter server applies gradients; passed to the script's strategy."""

    SYNC = "Sync"
    ASYNC = "Async"
    HALF_ASYNC = "HalfAsync"
    GEO = "Geo"


class SuccessPolicyType(StrEnum):
    """The trainers that must succeed for the job to succeed."""

    ALL = "All"
    ANY = "Any"
    RANK_ZERO = "RankZero"


class SuccessPolicy(Model):
    """The condition for the success of a job."""

    type: SuccessPolicyType = Field(
        default=SuccessPolicyType.ALL,
        description="Which trainers must succeed. Parameter servers do not count.",
    )


class StartupOrder(StrEnum):
    """Whether trainers wait for the parameter servers."""

    IN_ORDER = "InOrder"
    ANY_ORDER = "AnyOrder"


class StartupPolicy(Model):
    """The order in which a job's replicas start."""

    order: StartupOrder = Field(
        default=StartupOrder.IN_ORDER,
        description="InOrder: trainers start once all parameter servers are ready. AnyOrder: all start "
        "together.",
    )


class CleanPodPolicy(StrEnum):
    """The pods to delete when the job has finished."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class EnvVar(OpenModel):
    """A variable of a container's environment."""

    name: NonEmpty = Field(description="The variable's name.")


class Resources(OpenModel):
    """The resources of a container."""

    limits: dict[str, Quantity] | None = Field(
        default=None, description="The maximum of each resource that the container may use."
    )


class Container(OpenModel):
    """A container of a pod's template."""

    name: NonEmpty = Field(description="The container's name in the pod.")
    image: NonEmpty = Field(description="The image that it runs.")
    env: tuple[EnvVar, ...] | None = Field(
        default=None, description="Variables in addition to those for the replica's role."
    )
    ports: tuple[dict[str, Any], ...] | None = Field(
        default=None, description="Ports, in addition to those of the job."
    )
    volume_mounts: tuple[dict[str, Any], ...] | None = Field(
        default=None, description="Mounts, in addition to those of the job."
    )
    resources: Resources | None = None


class PodSpec(OpenModel):
    """A pod's spec. The operator sets restartPolicy, hostname, subdomain and the role's environment."""

    containers: Annotated[tuple[Container, ...], Field(min_length=1, max_length=16)] = Field(
        description="The main container is the one named fleet, or else the first; its exit code counts.",
    )
    init_containers: tuple[Container, ...] | None = Field(
        default=None, description="Containers that run before the others, or beside them as sidecars."
    )
    restart_policy: Literal["Never"] | None = Field(
        default=None, description="Only Never: the operator restarts replicas itself."
    )
    node_selector: Labels | None = Field(default=None, description="Labels that the pod's node must have.")
    tolerations: tuple[dict[str, Any], ...] | None = Field(
        default=None, description="Taints that the pod's node may have."
    )
    volumes: tuple[dict[str, Any], ...] | None = Field(
        default=None, description="Volumes, in addition to those of the job."
    )
    host_network: StrictBool | None = Field(
        default=None, description="Only false. Use spec.network.hostNetwork, which also assigns the ports."
    )


class TemplateMetadata(Model):
    """Additional metadata of a template's pods."""

    labels: Labels | None = Field(default=None, description="Labels in addition to the operator's own.")
    annotations: Annotations | None = Field(default=None, description="Annotations of the pods.")


class PodTemplate(Model):
    """A template for pods."""

    metadata: TemplateMetadata | None = None
    spec: PodSpec

    @property
    def labels(self) -> dict[str, str]:
        """The pods' labels, in addition to the operator's labels."""
        return (self.metadata and self.metadata.labels) or {}

    @property
    def annotations(self) -> dict[str, str]:
        """The pods' annotations."""
        return (self.metadata and self.metadata.annotations) or {}

    @property
    def main_container(self) -> Container:
        """The container that determines the replica's exit code, success and readiness."""
        containers = self.spec.containers
        return next((each for each in containers if each.name == MAIN_CONTAINER), containers[0])


class UnhealthyPodEvictionPolicy(StrEnum):
    """Whether a pod that is not ready may be evicted regardless of the budget."""

    IF_HEALTHY_BUDGET = "IfHealthyBudget"
    ALWAYS_ALLOW = "AlwaysAllow"


class DisruptionBudget(Model):
    """The PodDisruptionBudget of the parameter servers."""

    min_available: Servers | None = Field(
        default=None, description="The number of servers that must stay available. Default: all."
    )
    unhealthy_pod_eviction_policy: UnhealthyPodEvictionPolicy | None = Field(
        default=None,
        description="As in policy/v1: whether servers that are not ready may always be evicted, or only while"
        " enough other servers are available. Default: the cluster's, IfHealthyBudget.",
    )


class PserverSpec(Model):
    """The parameter servers."""

    replicas: Servers = Field(default=1, description="How many parameter servers share the parameters.")
    port: Port = Field(default=6174, description="The port of control messages and of the health service.")
    template: PodTemplate | None = Field(default=None, description="Replaces spec.template for this role.")
    disruption_budget: DisruptionBudget | None = Field(
        default=None,
        description="A PodDisruptionBudget for the servers while the job runs. Without minAvailable no server"
        " is evicted, and drains wait for the job.",
    )


class TrainerSpec(Model):
    """The trainers."""

    replicas: Trainers = Field(default=1, description="How many trainer pods share the data.")
    min_replicas: Trainers | None = Field(
        default=None,
        description="With maxReplicas: replicas may change between the two; in mode ParameterServer with"
        " syncMode Sync or Geo, or in a queue of Kueue, only while the job is suspended.",
    )
    max_replicas: Trainers | None = Field(default=None, description="The maximum; see minReplicas.")
    port: Port = Field(
        default=6175, description="The port where processes of a collective job find each other."
    )
    template: PodTemplate | None = Field(default=None, description="Replaces spec.template for this role.")
    nproc_per_node: Annotated[StrictInt, Field(ge=1, le=64)] | None = Field(
        default=None,
        description="Processes per pod, as torchrun's --nproc-per-node, mode Collective only. Default:"
        " devices.count, else 1.",
    )
    devices: Devices | None = Field(
        default=None, description="The devices of each trainer, such as GPUs. Default: those of its template."
    )
    shared_memory: Annotated[str, StringConstraints(pattern="^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$")] | None = Field(
        default=None,
        description="The size of /dev/shm, for example 2Gi; it counts as memory of the pod. 0 is the"
        " container runtime's 64 MiB. Default: the pod's memory limit with devices or several processes,"
        " else 0.",
    )


class RunPolicy(Model):
    """How long a job may run, and what remains of it afterwards. Changes are allowed at any time."""

    backoff_limit: Annotated[StrictInt, Field(ge=0, le=MAX_SECONDS)] = Field(
        default=6, description="The number of failures that lead to a restart; the next one fails the job."
    )
    active_deadline_seconds: Annotated[StrictInt, Field(ge=1, le=MAX_SECONDS)] | None = Field(
        default=None, description="The job fails if it has not finished this long after its start."
    )
    pending_deadline_seconds: Annotated[StrictInt, Field(ge=1, le=MAX_SECONDS)] | None = Field(
        default=None,
        description="The job fails if, at any time, not all of its replicas run for this long; with syncMode"
        " Async or HalfAsync and minReplicas, it needs only its servers and minReplicas trainers.",
    )
    ttl_seconds_after_finished: Seconds | None = Field(
        default=None, description="The job is deleted this long after it has finished. Default: never."
    )
    clean_pod_policy: CleanPodPolicy = Field(
        default=CleanPodPolicy.RUNNING, description="The pods that are deleted when the job has finished."
    )


class FleetJobSpec(Model):
    """The replicas of a job, and the policies for failures, success and cleanup."""

    mode: Mode = Field(description="ParameterServer or Collective. It cannot change.")
    suspend: StrictBool = Field(default=False, description="While true, no pod of the job runs.")
    managed_by: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = Field(
        default=None,
        description="Another controller that manages this job, such as kueue.x-k8s.io/multikueue; the"
        " operator then ignores the job. It cannot change.",
    )
    template: PodTemplate | None = Field(default=None, description="The pods of every role without its own.")
    pserver: PserverSpec | None = Field(default=None, description="Mode ParameterServer only.")
    trainer: TrainerSpec = Field(description="How many trainers there are and what they run.")
    sync_mode: SyncMode = Field(
        default=SyncMode.SYNC,
        description="Sync: all trainers move step by step. Async, HalfAsync, Geo: each at its own pace,"
        " with mode ParameterServer only.",
    )
    failure_policy: FailurePolicy = FailurePolicy()
    success_policy: SuccessPolicy = SuccessPolicy()
    startup_policy: StartupPolicy = StartupPolicy()
    run_policy: RunPolicy = RunPolicy()
    scheduling: Scheduling | None = None
    pod_group_policy: PodGroupPolicy | None = None
    network: Network | None = None
    checkpoint: Checkpoint | None = None


class ObjectMeta(Model):
    """The fields of a job's metadata on which the operator's decisions depend."""

    model_config = ConfigDict(extra="ignore")

    name: NonEmpty
    namespace: NonEmpty = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class FleetJob(Model):
    """A job: its desired state (`spec`) and its current state (`status`).

    Created by `fleet_operator.api.parse_job`, which also checks the rules across fields, or by `read_job`,
    which leaves them to the API server.
    """

    api_version: Literal["fleetjob.dev/v1alpha1"] = "fleetjob.dev/v1alpha1"
    kind: Literal["FleetJob"] = "FleetJob"
    metadata: ObjectMeta
    spec: FleetJobSpec
    status: FleetJobStatus = FleetJobStatus()

    @property
    def name(self) -> str:
        """The job's name."""
        return self.metadata.name

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of this job in start-up order."""
        return (Role.TRAINER,) if self.spec.pserver is None else (Role.PSERVER, Role.TRAINER)

    def replicas(self, role: Role) -> int:
        """Return the desired number of a role's replicas, or 0 if this job does not have the role."""
        if role is Role.TRAINER:
            return self.spec.trainer.replicas
        return 0 if self.spec.pserver is None else self.spec.pserver.replicas

    @property
    def num_replicas(self) -> int:
        """The total desired number of replicas."""
        return sum(self.replicas(role) for role in self.roles)

    def port(self, role: Role) -> int:
        """Return the port of one of this job's roles."""
        return self._of(role).port

    def template(self, role: Role) -> PodTemplate:
        """Return the pod template of a role: the role's own or else the shared template."""
        template = self._of(role).template or self.spec.template
        if template is None:
            raise LookupError(
                f"FleetJob {self.name} has no template for {role.value}: parse_job refuses such a job"
            )
        return template

    @property
    def nproc_per_node(self) -> int:
        """The number of training processes in one trainer pod."""
        trainer = self.spec.trainer
        if self.spec.mode is not Mode.COLLECTIVE:
            return 1
        return trainer.nproc_per_node or (trainer.devices.count if trainer.devices else 1)

    @property
    def most_trainers(self) -> int:
        """The largest number of trainers to which the job may be scaled."""
        return max(self.spec.trainer.replicas, self.spec.trainer.max_replicas or 0)

    @property
    def elastic(self) -> bool:
        """True if trainers may join and leave while others train.

        Sync waits for all trainers, Geo divides by their number, and Kueue admits groups of a fixed size.
        """
        return (
            self.spec.mode is Mode.PARAMETER_SERVER
            and self.spec.sync_mode in (SyncMode.ASYNC, SyncMode.HALF_ASYNC)
            and self.spec.trainer.max_replicas is not None
            and self.gang is not Gang.KUEUE
        )

    @property
    def least_trainers(self) -> int:
        """The smallest number of trainers with which the job can run."""
        fewest = self.spec.trainer.min_replicas if self.elastic else None
        return fewest or self.spec.trainer.replicas

    @property
    def host_ports(self) -> PortRange | None:
        """The range of host ports for the replicas, or None without the host network."""
        network = self.spec.network
        return network.port_range if network is not None and network.host_network else None

    @property
    def tls(self) -> Tls | None:
        """The certificates that replicas use for TLS, or None if traffic is unencrypted."""
        return self.spec.network.tls if self.spec.network is not None else None

    @property
    def gang(self) -> Gang:
        """The gang scheduler that holds back the pods until all of them can run, or `Gang.NONE`."""
        if self.spec.pod_group_policy is not None:
            return self.spec.pod_group_policy.gang
        return Gang.NONE if self.queue_name is None else Gang.KUEUE

    @property
    def queue_name(self) -> str | None:
        """The name of the Kueue LocalQueue, from the policy or else from Kueue's label on the job.

        A label may change at any time. Its value at the job's start counts, and the ledger keeps that value
        until the job is suspended.
        """
        policy = self.spec.pod_group_policy
        if policy is not None:
            return policy.kueue.queue_name if policy.kueue is not None else None
        if self.spec.suspend or self.status.state in (None, JobState.SUSPENDED):
            return self.metadata.labels.get(LABEL_QUEUE) or None
        return self.status.ledger.queue_name

    def gang_name(self, life: int) -> str:
        """Return the name of the gang, which changes each time the job restarts.

        A PodGroup is an object of its job. A group of Kueue is only a name, so the name must be unique: pods
        of a deleted job with the same name may still exist.
        """
        return gang_name(self.name, life, self.metadata.uid if self.gang is Gang.KUEUE else "")

    @property
    def min_member(self) -> int:
        """The number of pods that must be scheduled together."""
        policy = self.spec.pod_group_policy
        asked = policy.min_member if policy is not None else None
        return asked or self.replicas(Role.PSERVER) + self.least_trainers

    @property
    def checkpoint_scope(self) -> CheckpointScope:
        """The scope of a checkpoint volume, from the manifest or else the default."""
        checkpoint = self.spec.checkpoint
        if checkpoint is not None and checkpoint.scope is not None:
            return checkpoint.scope
        own = checkpoint is not None and checkpoint.volume_claim_template is not None
        return CheckpointScope.PSERVER if own and self.spec.pserver is not None else CheckpointScope.JOB

    @property
    def keeps_parameters(self) -> bool:
        """True if the parameters outlive the servers, on a checkpoint volume."""
        return self.spec.pserver is not None and self.spec.checkpoint is not None

    @property
    def managed_elsewhere(self) -> bool:
        """True if another controller manages the job."""
        return self.spec.managed_by not in (None, CONTROLLER)

    @property
    def start_deadline_seconds(self) -> int:
        """The number of seconds for which a replica waits for peers that have not started yet."""
        return self.spec.run_policy.pending_deadline_seconds or START_DEADLINE_SECONDS

    @property
    def starts_together(self) -> bool:
        """True if a replica can be restarted only together with all other replicas.

        The processes of a collective job find each other only at their start. Kueue releases a failed pod,
        and with it the pod's name, only when its whole group has ended.
        """
        return self.spec.mode is Mode.COLLECTIVE or self.gang is Gang.KUEUE

    @property
    def failure_action(self) -> FailureAction:
        """The reaction to a replica's failure, from the policy or else the mode's default."""
        if self.spec.failure_policy.action is not None:
            return self.spec.failure_policy.action
        collective = self.spec.mode is Mode.COLLECTIVE
        return FailureAction.RESTART_JOB if collective else FailureAction.RESTART_REPLICA

    def with_trainers(self, replicas: int) -> Self:
        """Return a copy of the job with the given number of trainers."""
        trainer = self.spec.trainer.model_copy(update={"replicas": replicas})
        return self.model_copy(update={"spec": self.spec.model_copy(update={"trainer": trainer})})

    def with_status(self, status: FleetJobStatus) -> Self:
        """Return a copy of the job with the given status."""
        return self.model_copy(update={"status": status})

    def to_manifest(self) -> dict[str, Any]:
        """Return the job as a manifest with only the fields that its author set."""
        document = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {"apiVersion": self.api_version, "kind": self.kind, **document}

    def _of(self, role: Role) -> PserverSpec | TrainerSpec:
        part = self.spec.trainer if role is Role.TRAINER else self.spec.pserver
        if part is None:
            raise LookupError(f"FleetJob {self.name} has no {role.value}: its mode is {self.spec.mode.value}")
        return part
