"""The commands that start nothing, and the exit status of those that are refused before they do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fleet_operator import __version__, cli
from fleet_operator.api import Role
from tests.support.local import job_manifest


@pytest.fixture
def fleetjob(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command line and gives (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: str = ""):
        monkeypatch.setattr(sys, "argv", ["fleetjob", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return call


def line_of(path: str, text: str) -> int:
    (line,) = [number for number, line in enumerate(Path(path).read_text().splitlines(), 1) if text in line]
    return line


@pytest.fixture
def write(tmp_path):
    def to_file(manifest) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(manifest if isinstance(manifest, str) else yaml.safe_dump(manifest))
        return str(path)

    return to_file


def test_a_valid_manifest(fleetjob, write):
    status, out, err = fleetjob("validate", "-f", write(job_manifest("pass")))
    assert (status, err) == (0, "")
    assert out.endswith("job.yaml: FleetJob tiny is valid\n")


def test_a_manifest_on_standard_input(fleetjob):
    status, out, _ = fleetjob("validate", "-f", "-", stdin=yaml.safe_dump(job_manifest("pass")))
    assert (status, out) == (0, "standard input: FleetJob tiny is valid\n")


@pytest.mark.parametrize("command", ["validate", "render", "run"])
def test_every_problem_of_a_manifest_is_told_with_its_field_and_line(fleetjob, write, command):
    job = job_manifest("pass")
    job["spec"]["trainer"]["replicas"] = 0
    job["spec"]["backoff"] = 3
    path = write(job)
    status, out, err = fleetjob(command, "-f", path)
    assert (status, out) == (2, "")
    trainers, backoff = line_of(path, "replicas: 0"), line_of(path, "backoff: 3")
    assert f"\n  {path}:{trainers}: spec.trainer.replicas: found 0, expected at least 1\n" in err
    assert f"\n  {path}:{backoff}: spec.backoff: found an unknown field" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["validate", "run", "submit"])
def test_a_field_that_pods_do_not_have_is_told_before_anything_starts(fleetjob, write, command):
    job = job_manifest("pass")
    job["spec"]["trainer"]["replicas"] = 0
    job["spec"]["trainer"]["template"]["spec"]["containers"][0]["evn"] = []
    status, out, err = fleetjob(command, "-f", write(job))
    assert (status, out) == (2, "")
    assert "by the fields of Kubernetes v1." in err
    assert "spec.trainer.template.spec.containers[0].evn: found an unknown field" in err
    assert "did you mean env?" in err
    assert "spec.trainer.replicas: found 0" in err


def test_a_variable_that_the_job_overwrites_is_warned_of(fleetjob, write):
    job = job_manifest("pass", env=[{"name": "PADDLE_TRAINER_ID", "value": "3"}])
    status, out, err = fleetjob("validate", "-f", write(job))
    assert (status, out.endswith("FleetJob tiny is valid\n")) == (0, True)
    assert err.startswith("warning: spec.trainer.template.spec.containers[0].env[0] (PADDLE_TRAINER_ID): ")


def test_slots_without_a_launcher_are_warned_of(fleetjob, write):
    job = job_manifest("pass", server=None)
    job["spec"]["trainer"]["nprocPerNode"] = 2
    main = job["spec"]["trainer"]["template"]["spec"]["containers"][0]
    main["command"] = ["python", "train.py"]
    status, out, err = fleetjob("validate", "-f", write(job))
    assert (status, out.endswith("FleetJob tiny is valid\n")) == (0, True)
    assert err.startswith("warning: spec.trainer.template.spec.containers[0].command: python starts train.py")


def test_a_launcher_of_one_machine_in_several_pods_is_warned_of(fleetjob, write):
    job = job_manifest("pass", server=None, trainers=2)
    main = job["spec"]["trainer"]["template"]["spec"]["containers"][0]
    main["command"] = ["torchrun", "--standalone", "train.py"]
    status, out, err = fleetjob("validate", "-f", write(job))
    assert (status, out.endswith("FleetJob tiny is valid\n")) == (0, True)
    assert err.startswith("warning: spec.trainer.template.spec.containers[0].command: --standalone is for")


def test_a_field_of_a_newer_kubernetes_can_be_let_pass(fleetjob, write):
    job = job_manifest("pass")
    main = job["spec"]["trainer"]["template"]["spec"]["containers"][0]
    main["teleport"] = True
    status, out, err = fleetjob("validate", "--allow-unknown-fields", "-f", write(job))
    assert status == 0
    assert out.endswith("FleetJob tiny is valid\n")
    assert err.startswith("warning: spec.trainer.template.spec.containers[0].teleport: Kubernetes v1.")
    main["tty"] = "yes"
    status, _, err = fleetjob("validate", "--allow-unknown-fields", "-f", write(job))
    assert status == 2
    assert "tty: found 'yes', expected true or false" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("a: [", "job.yaml:1:5: not YAML: did not find expected node content", id="broken-yaml"),
        pytest.param(
            "a: !!binary aGk=", "job.yaml:1:4: the tag !!binary has no meaning", id="what-is-no-json"
        ),
        pytest.param("", "holds nothing; expected one FleetJob", id="an-empty-file"),
        pytest.param("[1, 2]", "holds list; expected one FleetJob", id="a-list"),
        pytest.param(
            "kind: FleetJob\n---\nkind: Secret\n", "holds FleetJob, Secret; expected one", id="two-objects"
        ),
        pytest.param("kind: Job\napiVersion: batch/v1\n", "kind: found 'Job'", id="another-kind"),
    ],
)
def test_a_file_that_holds_no_job(fleetjob, write, text, said):
    status, out, err = fleetjob("validate", "-f", write(text))
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("command", ["validate", "run", "submit"])
def test_a_manifest_that_is_refused_is_an_object_for_programs(fleetjob, write, command):
    job = job_manifest("pass")
    job["spec"]["trainer"]["replicas"] = 0
    path = write(job)
    status, out, err = fleetjob(command, "-f", path, "-o", "json")
    refused = json.loads(out)
    assert (status, err) == (2, f"fleetjob: {refused['message']}\n")
    assert {name: refused[name] for name in ("state", "reason", "problems")} == {
        "state": "Invalid",
        "reason": "InvalidManifest",
        "problems": [
            {
                "path": "spec.trainer.replicas",
                "found": "0",
                "expected": "at least 1",
                "file": path,
                "line": line_of(path, "replicas: 0"),
            }
        ],
    }


def test_a_file_that_cannot_be_read_is_an_object_for_programs(fleetjob, write):
    path = write("kind: FleetJob\nspec: [")
    status, out, err = fleetjob("validate", "-f", path, "-o", "json")
    refused = json.loads(out)
    assert (status, refused["state"], refused["reason"]) == (2, "Invalid", "InvalidManifest")
    (problem,) = refused["problems"]
    assert (problem["file"], problem["line"], problem["column"]) == (path, 2, 8)
    assert err == f"fleetjob: {refused['message']}\n"


def test_an_option_that_is_refused_is_an_object_for_programs(fleetjob, write):
    job = job_manifest("pass")
    status, out, _ = fleetjob("run", "-o", "json", "--volume", "data=.", "-f", write(job))
    refused = json.loads(out)
    assert (status, refused["state"], refused["reason"]) == (2, "Invalid", "GivenError")
    assert refused["message"].endswith("the job has no volume data (it has: none)")


def test_a_folder_that_cannot_be_made_is_an_object_for_programs(fleetjob, write, tmp_path):
    (tmp_path / "file").touch()
    manifest = write(job_manifest("pass"))
    status, out, _ = fleetjob(
        "run", "-o", "json", "--log-dir", str(tmp_path / "file" / "logs"), "-f", manifest
    )
    refused = json.loads(out)
    assert (status, refused["state"], refused["reason"]) == (1, "Failed", "NotADirectoryError")


def test_a_valid_manifest_is_an_object_for_programs(fleetjob, write):
    job = job_manifest("pass", env=[{"name": "PADDLE_TRAINER_ID", "value": "3"}])
    status, out, err = fleetjob("validate", "-o", "json", "-f", write(job))
    valid = json.loads(out)
    (warning,) = valid.pop("warnings")
    assert (status, err, valid) == (0, "", {"state": "Valid", "name": "tiny", "problems": []})
    assert warning.startswith("spec.trainer.template.spec.containers[0].env[0] (PADDLE_TRAINER_ID): ")


def test_an_alias_bomb_is_refused(fleetjob, write):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    status, out, err = fleetjob("validate", "-f", write("\n".join(["a0: &a0 [x, x, x]", *levels])))
    assert (status, out) == (2, "")
    assert "the document expands to more than" in err


def test_the_version(fleetjob):
    assert fleetjob("--version") == (0, f"fleetjob {__version__}\n", "")


def test_only_so_many_problems_are_shown(fleetjob, write):
    job = job_manifest("pass")
    job["spec"] |= {f"x{number}": 1 for number in range(60)}
    status, out, err = fleetjob("validate", "-f", write(job))
    assert (status, out) == (2, "")
    assert err.endswith("\n  and 10 more\n")


def test_a_file_that_is_not_there(fleetjob):
    status, _, err = fleetjob("validate", "-f", "absent.yaml")
    assert status == 2
    assert (
        err == "fleetjob: cannot read absent.yaml: No such file or directory; expected a FleetJob manifest\n"
    )


def test_what_only_a_cluster_has_is_refused_before_any_work(fleetjob, write, tmp_path):
    job = job_manifest(
        "pass", env=[{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    )
    path = write(job)
    status, out, err = fleetjob("run", "-o", "json", "-f", path)
    assert status == 2
    lines = {problem["line"] for problem in json.loads(out)["problems"]}
    assert line_of(path, "secretKeyRef:") in lines
    place = f"{path}:{line_of(path, 'secretKeyRef:')}"
    field = "spec.trainer.template.spec.containers[0].env[0].valueFrom.secretKeyRef"
    assert f"{place}: {field}: found TOKEN from s" in err
    assert not (tmp_path / "logs").exists()


def test_render_prints_what_the_operator_would_make(fleetjob, write):
    status, out, _ = fleetjob("render", "-f", write(job_manifest("pass", trainers=2)))
    assert status == 0
    assert [(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(out)] == [
        ("Service", "tiny"),
        ("NetworkPolicy", "tiny"),
        ("Pod", "tiny-pserver-0"),
        ("Pod", "tiny-trainer-0"),
        ("Pod", "tiny-trainer-1"),
    ]


def test_render_prints_what_a_job_has_beside_its_pods(fleetjob, write):
    job = job_manifest("pass")
    job["spec"] |= {
        "checkpoint": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}},
        "network": {"policy": {"type": "Isolated"}},
        "podGroupPolicy": {"volcano": {"queue": "night"}},
    }
    job["spec"]["pserver"] |= {"replicas": 2, "disruptionBudget": {}}
    _, out, _ = fleetjob("render", "-f", write(job))
    documents = list(yaml.safe_load_all(out))
    assert [each["kind"] for each in documents] == [
        "Service",
        *(2 * ["PersistentVolumeClaim"]),
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PodGroup",
        *(3 * ["Pod"]),
    ]
    claims = [each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"]
    mounted = documents[-3]["spec"]["volumes"][-1]["persistentVolumeClaim"]["claimName"]
    assert claims[0] == mounted
    assert "&id" not in out


def test_a_mistake_of_our_own_is_a_sentence_too(fleetjob, write, monkeypatch):
    def broken(document, **_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(sys.modules["fleet_operator.manifests.manifest"], "check_manifest", broken)
    status, _, err = fleetjob("validate", "-f", write(job_manifest("pass")))
    assert status == 1
    assert err.startswith("fleetjob: internal error in fleetjob: ZeroDivisionError: by zero (")


@pytest.mark.parametrize("verb", ["delete", "suspend", "resume", "status", "logs", "events"])
@pytest.mark.parametrize("name", ["", ".", "fj/digits", "a?b"])
def test_what_is_no_name_reaches_no_server(fleetjob, verb, name):
    """An empty one would be the path of all jobs of the namespace."""
    status, out, err = fleetjob(verb, name)
    assert (status, out) == (2, "")
    assert f"{name!r} is not a valid name of a FleetJob" in " ".join(err.replace("│", " ").split())


def test_a_missing_option_is_named(fleetjob):
    status, out, err = fleetjob("run")
    assert (status, out) == (2, "")
    assert "--filename" in err


SLOW_TO_IMPORT = (
    "aiohttp",
    "asyncio",
    "kopf",
    "kubernetes",
    "matplotlib",
    "prometheus_client",
    "tensorboard",
    "yaml",
)

HELP = """
import json, sys
from fleet_operator import __version__, cli
try:
    cli.main()
finally:
    print("\\n" + json.dumps(sorted(sys.modules)))
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        pytest.param([], (*SLOW_TO_IMPORT, "pydantic"), id="of-the-program"),
        pytest.param(["run"], SLOW_TO_IMPORT, id="of-a-command"),  # Typer itself looks for pydantic then
    ],
)
def test_help_imports_nothing_that_takes_long(arguments, absent):
    command = [sys.executable, "-c", HELP, *arguments, "--help"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    imported = set(json.loads(output.splitlines()[-1]))
    assert "Usage" in output
    assert imported.isdisjoint(absent)
    assert not {each for each in imported if each.startswith("fleet_operator.")} - {
        "fleet_operator.errors",
        "fleet_operator.cli",
        *(f"fleet_operator.cli.{each}" for each in ("app", "options", "remote")),
    }


@pytest.mark.parametrize("role", Role)
def test_logs_of_each_role_can_be_asked_for(fleetjob, role):
    status, _, err = fleetjob("logs", "digits", "--role", role.value, "--kubeconfig", "absent")
    assert status == 1
    assert "absent" in err
