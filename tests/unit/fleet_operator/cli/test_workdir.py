from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_operator.api import Role, parse_job
from fleet_operator.cli.workdir import choose_workdirs, project_root
from fleet_operator.errors import InvalidJob
from tests.support.local import job_manifest


def job(*, workdirs: dict[str, str] | None = None, **commands: str) -> Any:
    """Return a job whose roles run these commands."""
    document = job_manifest("", server="" if "pserver" in commands else None)
    for role, command in commands.items():
        container = document["spec"][role]["template"]["spec"]["containers"][0]
        container["command"] = command.split()
        if workdirs and role in workdirs:
            container["workingDir"] = workdirs[role]
    return parse_job(document)


@pytest.fixture
def manifest(tmp_path):
    """A manifest two folders below the root of its project."""
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "jobs" / "mnist"
    folder.mkdir(parents=True)
    return folder / "fleetjob.yaml"


@pytest.mark.parametrize("mark", [".git", "pyproject.toml", "Dockerfile"])
def test_the_project_root_is_the_nearest_marked_folder(tmp_path, mark):
    (tmp_path / mark).touch()
    folder = tmp_path / "examples" / "digits"
    folder.mkdir(parents=True)
    assert project_root(folder / "fleetjob.yaml") == tmp_path
    (folder.parent / "Dockerfile").touch()
    assert project_root(folder / "fleetjob.yaml") == folder.parent


def test_without_a_mark_it_is_the_manifests_own_folder(tmp_path):
    assert project_root(tmp_path / "fleetjob.yaml") == tmp_path


def test_a_relative_path_is_looked_at_from_here(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path / "jobs")
    assert project_root(Path("fleetjob.yaml")) == tmp_path
    assert project_root(Path("-")) == tmp_path


@pytest.mark.parametrize(
    ("files", "command", "expected"),
    [
        pytest.param(["jobs/mnist/train.py"], "python train.py", "jobs/mnist", id="beside-the-manifest"),
        pytest.param(
            ["jobs/mnist/train.py"], "python jobs/mnist/train.py", ".", id="by-its-path-from-the-root"
        ),
        pytest.param(["train.py"], "python train.py", ".", id="at-the-root"),
        pytest.param(
            ["jobs/mnist/train.py", "train.py"], "python train.py", ".", id="in-both-as-in-an-image"
        ),
        pytest.param([], "python -m train", ".", id="no-script"),
    ],
)
def test_the_working_directory_is_the_root_or_beside_the_manifest(
    tmp_path, manifest, files, command, expected
):
    for file in files:
        (tmp_path / file).touch()
    chosen = choose_workdirs(job(trainer=command), manifest)
    assert chosen.folders == {Role.TRAINER: tmp_path / expected}
    told, *more = chosen.remarks
    assert told == f"working directory: {tmp_path / expected}"
    assert bool(more) is (len(files) == 2)
    for remark in more:
        assert f"--workdir {manifest.parent}" in remark


def test_trainers_that_share_a_folder_are_told_who_saves(manifest):
    def said(trainers: int, server: str | None = None, slots: int = 1) -> bool:
        document = job_manifest("", server=server, trainers=trainers)
        document["spec"]["trainer"]["nprocPerNode"] = slots
        remark = choose_workdirs(parse_job(document), manifest).remarks[-1]
        return "one process of each trainer writes to the same files" in remark

    assert said(2)
    assert said(2, slots=4), "its launcher gives each trainer one such process"
    assert not said(1)
    assert not said(2, server=""), "with parameter servers there is no local rank"


def test_all_scripts_must_be_there(tmp_path, manifest):
    (tmp_path / "serve.py").touch()
    for name in ("serve.py", "train.py"):
        (manifest.parent / name).touch()
    chosen = choose_workdirs(job(pserver="python serve.py", trainer="python train.py"), manifest)
    assert set(chosen.folders.values()) == {manifest.parent}


def test_a_working_directory_of_the_template_comes_first_where_it_is_here(tmp_path, manifest):
    (tmp_path / "train.py").touch()
    own = tmp_path / "own"
    own.mkdir()
    (own / "serve.py").touch()
    workdirs = {"pserver": str(own), "trainer": str(tmp_path / "absent")}
    chosen = choose_workdirs(
        job(pserver="python serve.py", trainer="python train.py", workdirs=workdirs), manifest
    )
    assert chosen.folders == {Role.PSERVER: own, Role.TRAINER: tmp_path}
    assert chosen.remarks == (f"working directories: {own} (pserver), {tmp_path} (trainer)",)


def test_the_command_line_comes_before_all(tmp_path, manifest):
    asked, own = tmp_path / "asked", tmp_path / "own"
    for folder in (asked, own, manifest.parent):
        folder.mkdir(exist_ok=True)
        (folder / "train.py").touch()
    chosen = choose_workdirs(job(trainer="python train.py", workdirs={"trainer": str(own)}), manifest, asked)
    assert chosen.folders == {Role.TRAINER: asked}


@pytest.mark.parametrize(
    ("own", "asked", "workdir", "tried"),
    [
        pytest.param(None, None, ".", ["train.py", "jobs/mnist/train.py"], id="in-both-folders"),
        pytest.param(None, "asked", "asked", ["asked/train.py"], id="in-the-one-that-was-asked-for"),
        pytest.param("asked", None, "asked", ["asked/train.py"], id="in-the-template's"),
    ],
)
def test_a_script_that_is_not_there_is_told_with_what_was_tried(
    tmp_path, manifest, own, asked, workdir, tried
):
    (tmp_path / "asked").mkdir()
    workdirs = {"trainer": str(tmp_path / own)} if own else {}
    with pytest.raises(InvalidJob) as refused:
        choose_workdirs(
            job(trainer="python train.py", workdirs=workdirs), manifest, tmp_path / asked if asked else None
        )
    [problem] = refused.value.problems
    assert problem.path == "spec.trainer.template.spec.containers[0].command"
    assert problem.found == "'train.py'"
    assert f"(tried: {' and '.join(str(tmp_path / each) for each in tried)})" in problem.expected
    assert f"the working directory is {tmp_path / workdir}:" in problem.expected
    assert "--workdir" in problem.expected
