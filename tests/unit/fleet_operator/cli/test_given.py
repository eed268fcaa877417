"""What the command line gives a run in the place of volumes and Secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_operator.api import parse_job
from fleet_operator.cli.given import GivenError, check_folders, describe, read_given
from tests.support.local import job_manifest


def job_with(*volumes: dict[str, Any], **spec: Any) -> Any:
    document = job_manifest("pass", env=[{"name": "EPOCHS", "value": "3"}], **spec)
    pod_spec = document["spec"]["trainer"]["template"]["spec"]
    pod_spec["volumes"] = list(volumes)
    mounts = [{"name": each["name"], "mountPath": f"/{each['name']}"} for each in volumes]
    pod_spec["containers"][0]["volumeMounts"] = mounts
    return parse_job(document)


def test_folders_are_absolute_and_the_later_of_a_name_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = read_given(["data=elsewhere", "data=./a=b", "state=~/state"], [])
    assert given.volumes == {"data": tmp_path / "a=b", "state": Path("/home/me/state")}
    assert given.variables is None


@pytest.mark.parametrize("text", ["data", "=folder", "data="])
def test_a_volume_is_a_name_and_a_folder(text):
    with pytest.raises(GivenError, match="expected NAME=FOLDER, such as"):
        read_given([text], [])


def test_lines_of_variables_are_taken_as_they_are(tmp_path):
    first, second = tmp_path / "first.env", tmp_path / "second.env"
    first.write_text('# comment\n\nA=1\nQUOTED="x y" \n  URL=http://h?a=b\nEMPTY=\n')
    second.write_text("\ufeffA=2\r\n")
    assert read_given([], [first, second]).variables == {
        "A": "2",
        "QUOTED": '"x y" ',
        "URL": "http://h?a=b",
        "EMPTY": "",
    }


@pytest.mark.parametrize("line", ["NAME", "A B=1", "export A=1", "=1", "1A=2", "A=\0"])
def test_a_line_that_is_no_variable_is_named(tmp_path, line):
    path = tmp_path / "x.env"
    path.write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(GivenError, match=rf"{path}, line 2: found .*, expected NAME=VALUE"):
        read_given([], [path])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(GivenError, match="No such file or directory; expected lines NAME=VALUE"):
        read_given([], [tmp_path / "no.env"])


@pytest.mark.parametrize(
    ("volume", "why"),
    [
        pytest.param("other={folder}", r"the job has no volume other \(it has: data\)", id="an-unknown-name"),
        pytest.param("data={folder}/no", "no such folder", id="a-folder-that-is-not-there"),
        pytest.param("data={folder}/file", "found a file", id="a-file"),
    ],
)
def test_a_folder_that_cannot_stand_for_a_volume_is_refused(tmp_path, volume, why):
    (tmp_path / "file").touch()
    job = job_with({"name": "data", "persistentVolumeClaim": {"claimName": "data"}})
    with pytest.raises(GivenError, match=why):
        check_folders(job, read_given([volume.format(folder=tmp_path)], []))


def test_what_begins_empty_in_a_cluster_is_made(tmp_path):
    job = job_with({"name": "cache", "emptyDir": {}}, checkpoint={"claimName": "state"})
    given = read_given([f"cache={tmp_path}/a/b", f"checkpoint={tmp_path}/c/d"], [])
    check_folders(job, given)
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c" / "d").is_dir()
    assert list(describe(job, given)) == [f"volumes: /cache is {tmp_path}/a/b, /checkpoint is {tmp_path}/c/d"]


def test_a_volume_named_like_the_checkpoint_is_refused(tmp_path):
    job = job_with({"name": "checkpoint", "emptyDir": {}}, checkpoint={"claimName": "state"})
    with pytest.raises(GivenError, match="expected another name"):
        check_folders(job, read_given([f"checkpoint={tmp_path}"], []))


def test_lines_that_count_for_nothing_are_told(tmp_path):
    (tmp_path / "x.env").write_text("EPOCHS=9\nOTHER=1\n")
    job = job_with()
    said = list(describe(job, read_given([], [tmp_path / "x.env"])))
    assert said == ["--env-file: the manifest's own values of EPOCHS take precedence"]
