from __future__ import annotations

from pathlib import Path

import pytest

from fleet_operator.cli.manifest import load_manifest, project_root


@pytest.mark.parametrize("written", ["2026-01-01", "2026-02-30", "2026-01-01T10:00:00Z"])
def test_a_date_without_quotes_is_text_as_it_is_to_kubectl(tmp_path, written):
    path = tmp_path / "fleetjob.yaml"
    path.write_text(f"env: [{{name: DAY, value: {written}}}]")
    assert load_manifest(path) == {"env": [{"name": "DAY", "value": written}]}


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
