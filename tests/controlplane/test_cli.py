"""The command line against a real API server, with the operator at work."""

from __future__ import annotations

import asyncio
import json
import os
import pty
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.controlplane import free_ports
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.fleetjob import PROGRAM, Fleetjob, lines
from tests.support.jobs import collective_manifest, manifest
from tests.support.kube import WAIT_SECONDS, is_running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Manifest, Namespace


@pytest.fixture
def fleetjob(control_plane: ControlPlane, namespace: Namespace) -> Fleetjob:
    return Fleetjob(control_plane.admin.kubeconfig, namespace.name)


@pytest.fixture
def here(namespace: Namespace) -> tuple[str, str]:
    return ("-n", namespace.name)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a manifest without a namespace, and returns its path."""

    def to_file(document: Manifest) -> str:
        document["metadata"].pop("namespace", None)
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(path)

    return to_file


@pytest.fixture
def file(write: Callable[..., str]) -> str:
    return write(manifest())


async def test_submit_waits_for_the_end_and_tells_the_truth(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str], file: str
):
    process = await fleetjob.start("submit", "-f", file, "--wait", *here)
    told = lines(process.stdout)
    assert await anext(told) == f"FleetJob digits created in namespace {namespace.name}"
    await namespace.until_state("digits", "Running")
    await namespace.end(*TRAINERS)
    rest = [line async for line in told]
    assert any(
        line.startswith("digits Running pservers 2/2 trainers 2/2: all 4 replicas run") for line in rest
    )
    assert rest[-1].startswith("digits Succeeded")
    assert await process.wait() == 0
    # Once more: nothing runs again, and that is said.
    again = await fleetjob("submit", "-f", file, *here)
    assert again.status == 0
    assert again.out.startswith(
        "FleetJob digits unchanged; it has already succeeded: to run it again, delete it"
    )


async def test_submit_says_that_a_job_has_failed_by_its_exit_status(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str], write: Callable[..., str]
):
    failing = manifest(failurePolicy={"action": "FailJob"})
    failing["spec"]["template"]["metadata"] = {
        "annotations": {"fleet.test/exit-code": "3", "fleet.test/message": "no data"}
    }
    ended = await fleetjob("submit", "-f", write(failing), "--wait", *here)
    assert ended.status == 1
    assert "digits Failed" in ended.out.splitlines()[-1]
    assert "failed with exit code 3: no data" in ended.out.splitlines()[-1]


async def test_submit_gives_up_waiting_after_its_timeout_and_the_job_goes_on(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str], file: str
):
    ended = await fleetjob("submit", "-f", file, "--wait", "--timeout", "1.5", "-o", "json", *here)
    assert ended.status == 124
    assert json.loads(ended.out)["metadata"]["name"] == "digits"  # the one object is all of standard output
    assert "has not finished after 1.5 s and continues" in ended.err
    await namespace.until_state("digits", "Running")


async def test_submit_takes_characters_of_every_kind(
    fleetjob: Fleetjob, namespace: Namespace, here: tuple[str, str], write: Callable[..., str]
):
    text = "grün 日本 🚀"
    document = manifest()
    document["metadata"]["annotations"] = {"example.com/note": text}
    submitted = await fleetjob("submit", "-f", write(document), *here)
    assert (submitted.status, submitted.err) == (0, "")
    found = await namespace.get("fleetjobs", "digits")
    assert found["metadata"]["annotations"]["example.com/note"] == text


async def test_submit_changes_what_may_change_and_tells_what_may_not(
    fleetjob: Fleetjob, control_plane: ControlPlane, here: tuple[str, str], write: Callable[..., str]
):
    assert (await fleetjob("submit", "-f", write(manifest()), *here)).status == 0
    changed = write(manifest(runPolicy={"backoffLimit": 2}))
    assert (await fleetjob("submit", "-f", changed, *here)).out == "FleetJob digits changed\n"
    # What kubectl has set is not taken from it unasked.
    control_plane.admin.kubectl(
        "patch", "fj", "digits", *here, "--type=merge", "-p", '{"spec": {"runPolicy": {"backoffLimit": 9}}}'
    )
    conflict = await fleetjob("submit", "-f", changed, *here)
    assert conflict.status == 1
    assert ".spec.runPolicy.backoffLimit" in conflict.err
    assert conflict.err.endswith("use force (--force-conflicts)\n")
    assert (await fleetjob("submit", "-f", changed, "--force-conflicts", *here)).out == (
        "FleetJob digits changed\n"
    )
    refused = await fleetjob("submit", "-f", write(manifest(pserver={"replicas": 5})), *here)
    assert refused.status == 1
    assert "pserver" in refused.err
    assert refused.err.count("\n") == 1


async def test_submit_into_a_namespace_that_is_not_there_says_so(fleetjob: Fleetjob, file: str):
    refused = await fleetjob("submit", "-f", file, "-n", "nowhere")
    assert refused.status == 1
    assert refused.err.endswith('namespaces "nowhere" not found; create it, or choose another namespace\n')


async def test_status_shows_jobs_and_one_job(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str], file: str
):
    none = await fleetjob("status", *here)
    assert (none.status, none.out) == (0, f"no FleetJob in namespace {namespace.name}\n")
    await namespace.create_job(manifest(runPolicy={"backoffLimit": 3}))
    await namespace.until_state("digits", "Running")
    table = (await fleetjob("status", *here)).out.splitlines()
    assert table[0].split() == (
        ["NAME", "STATE", "PSERVERS", "TRAINERS", "PROGRESS", "LOSS", "ETA", "RESTARTS", "AGE", "WHY"]
    )
    assert table[1].split()[:4] == ["digits", "Running", "2/2", "2/2"]
    assert "all 4 replicas run" in table[1]
    one = (await fleetjob("status", "digits", *here)).out
    assert one.startswith(f"digits (ParameterServer) in {namespace.name}: Running\n  all 4 replicas run")
    assert "pservers  2 wanted, 2 active, 2 ready" in one
    assert "restarts  0 (0 failures of 3 allowed)" in one
    as_json = await fleetjob("status", "digits", "-o", "json", *here)
    assert json.loads(as_json.out)["status"]["state"] == "Running"
    listed = json.loads((await fleetjob("status", "-A", "-o", "json")).out)
    assert namespace.name in {job["metadata"]["namespace"] for job in listed["items"]}
    assert (await fleetjob("list", *here)).out.splitlines()[0] == table[0]
    own = json.loads((await fleetjob("list", "-o", "json", *here)).out)
    assert [job["metadata"]["name"] for job in own["items"]] == ["digits"]


async def test_status_watch_tells_each_change_and_ends_with_the_job(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str]
):
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    process = await fleetjob.start("status", "digits", "--watch", *here)
    told = lines(process.stdout)
    assert (await anext(told)).startswith("digits Running")
    await namespace.end(*TRAINERS)
    assert [line async for line in told][-1].startswith("digits Succeeded")
    assert await process.wait() == 0


async def test_on_a_terminal_status_watch_is_a_live_table(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str]
):
    await namespace.create_job(manifest(pservers=1, trainers=1))
    await namespace.until_state("digits", "Running")
    screen, terminal = pty.openpty()
    process = await fleetjob.start(
        "status", "digits", "-w", *here, stdout=terminal, environ={"TERM": "xterm"}
    )
    os.close(terminal)
    shown = ""
    async with asyncio.timeout(WAIT_SECONDS):
        while "Succeeded" not in shown:
            shown += (await asyncio.to_thread(os.read, screen, 65536)).decode()
            if "Running" in shown:
                await namespace.end("digits-trainer-0")
        assert await process.wait() == 0
    os.close(screen)
    assert shown.index("NAME") < shown.index("Running") < shown.index("Succeeded")
    assert "\x1b[1A" in shown  # the table is drawn over the one before


@pytest.mark.parametrize("mode", ["Collective", "Async"])
async def test_scale_changes_the_trainers_within_their_bounds(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str], mode: str
):
    bounds = {"replicas": 2, "minReplicas": 1, "maxReplicas": 3}
    servers = () if mode == "Collective" else SERVERS
    job = manifest(syncMode=mode, trainer=bounds) if servers else collective_manifest(trainer=bounds)
    await namespace.create_job(job)
    await namespace.until_running("digits", *servers, *TRAINERS)
    scaled = await fleetjob("scale", "digits", "--trainers", "3", *here)
    assert (scaled.status, scaled.out) == (0, "FleetJob digits scaled from 2 to 3 trainers\n")
    await namespace.until_running("digits", *servers, *TRAINERS, "digits-trainer-2")
    refused = await fleetjob("scale", "digits", "--trainers", "4", *here)
    assert refused.status == 1
    assert "maxReplicas" in refused.err


async def test_scale_of_a_job_that_cannot_change_says_why(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str]
):
    trainer = {"replicas": 2, "minReplicas": 1, "maxReplicas": 3}
    await namespace.create_job(manifest(syncMode="Geo", trainer=trainer))
    refused = await fleetjob("scale", "digits", "--trainers", "3", *here)
    assert refused.status == 1
    assert "syncMode Geo runs, because what trainers send is divided by their number" in refused.err


async def test_logs_of_all_replicas_are_merged_and_followed(
    namespace: Namespace, fleetjob: Fleetjob, control_plane: ControlPlane, here: tuple[str, str]
):
    # kwok has one log for all containers: each replica says the same.
    control_plane.pods_log.write_text(said(1, "one") + said(2, "two"))
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    once = await fleetjob("logs", "digits", "--role", "trainer", "--tail", "1", *here)
    assert once.out == "[trainer-0] two\n[trainer-1] two\n"
    process = await fleetjob.start("logs", "digits", "-f", "--role", "trainer", "--index", "1", *here)
    told = lines(process.stdout)
    assert [await anext(told), await anext(told)] == ["[trainer-1] one", "[trainer-1] two"]
    with control_plane.pods_log.open("a") as log:
        log.write(said(3, "three"))
    async with asyncio.timeout(WAIT_SECONDS):
        assert await anext(told) == "[trainer-1] three"
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    async with asyncio.timeout(WAIT_SECONDS):
        assert [line async for line in told] == []
        assert await process.wait() == 0


def said(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}.123456789Z stdout F {text}\n"


async def test_suspend_and_resume(namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str]):
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    held = await fleetjob("suspend", "digits", *here)
    assert held.out.startswith("FleetJob digits suspended;")
    await namespace.until_state("digits", "Suspended")
    assert (await fleetjob("suspend", "digits", *here)).out == "FleetJob digits is already suspended\n"
    assert (await fleetjob("resume", "digits", *here)).out == "FleetJob digits resumed; it starts again\n"
    await namespace.until(
        "events",
        "the second start to be told",
        lambda told: any((each["reason"], each["count"]) == ("Started", 2) for each in told.values()),
        fieldSelector="involvedObject.kind=FleetJob,involvedObject.name=digits",
    )
    events = await fleetjob("events", "digits", *here)
    # What happened again stands where it last happened.
    assert [line.split()[2] for line in events.out.splitlines()] == ["Suspended", "Resumed", "Started"]


async def test_delete_waits_until_nothing_is_left(
    namespace: Namespace, fleetjob: Fleetjob, here: tuple[str, str]
):
    await namespace.create_job(manifest())
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    assert all(map(is_running, pods.values()))
    await namespace.annotate("digits-trainer-0", stuck="yes")
    late = await fleetjob("delete", "digits", "--wait", "--timeout", "2", *here)
    assert late.status == 124
    assert "digits-trainer-0 still exists" in late.err
    gone = await fleetjob("status", "digits", *here)
    assert gone.status == 1
    assert gone.err == (
        f"fleetjob: no FleetJob digits in namespace {namespace.name}; `fleetjob status -A` lists all\n"
    )
    await namespace.annotate("digits-trainer-0", stuck=None)


async def test_it_is_a_plugin_of_kubectl_too(
    namespace: Namespace, fleetjob: Fleetjob, control_plane: ControlPlane
):
    await namespace.create_job(manifest())
    await namespace.until_state("digits", "Running")
    path = {"PATH": f"{PROGRAM.parent}:{fleetjob.environ['PATH']}"}
    ended = await fleetjob.run(
        "fleet", "status", "-n", namespace.name, program=control_plane.programs["kubectl"], environ=path
    )
    assert ended.status == 0
    assert ended.out.splitlines()[1].split()[:2] == ["digits", "Running"]
    helped = await fleetjob.run("fleet", "--help", program=control_plane.programs["kubectl"], environ=path)
    assert "Usage: kubectl fleet" in helped.out


async def test_a_shell_completes_the_names_of_jobs(namespace: Namespace, fleetjob: Fleetjob):
    for name in ("digits", "digits-2", "other"):
        await namespace.create_job(manifest(name, suspend=True))
    words = f"fleetjob logs -n {namespace.name} dig"
    asked = {"_FLEETJOB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    ended = await fleetjob.run(environ=asked)
    assert set(ended.out.split()) == {"digits", "digits-2"}


async def test_what_goes_wrong_is_a_sentence_with_what_to_do(
    namespace: Namespace,
    fleetjob: Fleetjob,
    control_plane: ControlPlane,
    here: tuple[str, str],
    tmp_path: Path,
):
    nobody = control_plane.admin.write_kubeconfig(tmp_path / "nobody", "no-such-token")
    account = f"/api/v1/namespaces/{namespace.name}/serviceaccounts/default/token"
    token = control_plane.admin.request("POST", account, {"kind": "TokenRequest", "spec": {}})["status"][
        "token"
    ]
    weak = control_plane.admin.write_kubeconfig(tmp_path / "weak", token, namespace.name)
    away = tmp_path / "away"
    port = free_ports(1)[0]
    away.write_text(
        control_plane.admin.kubeconfig.read_text().replace(
            control_plane.admin.server, f"https://127.0.0.1:{port}"
        )
    )
    cases = {
        ("status", "--kubeconfig", str(nobody)): "does not accept your credentials",
        ("status", "--kubeconfig", str(weak)): "you may not do this: fleetjobs.fleetjob.dev is forbidden",
        ("status", "--kubeconfig", str(away)): "is the cluster up, and is this the right context?",
        ("logs", "absent", *here): f"no FleetJob absent in namespace {namespace.name}",
        ("events", "absent", *here): f"no FleetJob absent in namespace {namespace.name}",
        ("delete", "absent", *here): f"no FleetJob absent in namespace {namespace.name}",
        ("scale", "absent", "--trainers", "2", *here): "no FleetJob absent in namespace",
        ("status", "--context", "moon"): "nothing named 'moon' in its contexts: there are test",
    }
    for arguments, said in cases.items():
        status, out, err = await fleetjob(*arguments)
        assert (status, out) == (1, ""), arguments
        assert said in err, arguments
        assert err.count("\n") == 1, err
