from __future__ import annotations

from pathlib import Path

import pytest

from fleet_operator.cli.manifest import project_root


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
