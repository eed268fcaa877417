"""Files for GitHub, Renovate and pre-commit: valid, pinned, with few rights, by the Makefile's verbs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tools import assets

WORKFLOWS = sorted(Path(".github/workflows").glob("*.yml"))
FORMS = sorted(
    set(Path(".github/ISSUE_TEMPLATE").glob("*.yml")) - {Path(".github/ISSUE_TEMPLATE/config.yml")}
)
RENOVATE = Path("renovate.json")
HOOKS = Path(".pre-commit-config.yaml")
BIN = Path(sys.executable).parent


def jobs(workflow: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(workflow.read_text())["jobs"])


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(workflow).values() for step in job["steps"]]


# --- workflows --------------------------------------------------------------------------------------


@pytest.mark.programs
def test_actionlint_finds_nothing(tmp_path: Path):
    actionlint = assets.find(["actionlint"])["actionlint"]
    # Without the linters that it would take from PATH: what it finds must not depend on the machine.
    command: list[str | Path] = [actionlint, "-no-color", "-shellcheck=", "-pyflakes="]
    ended = subprocess.run([*command, *WORKFLOWS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("matrix.python", "matrix.pithon"))
    ended = subprocess.run([*command, broken], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert 'property "pithon" is not defined' in ended.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_no_more_unless_a_job_says_so(workflow: Path):
    whole = yaml.safe_load(workflow.read_text())
    assert whole["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 for job in whole["jobs"].values())
    triggers = whole[True]  # YAML 1.1 takes `on` for a boolean
    if "pull_request" in triggers:  # anybody's code
        assert not any("permissions" in job for job in whole["jobs"].values())
        assert "secrets." not in workflow.read_text()
    assert "pull_request_target" not in triggers


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_say_their_version(workflow: Path):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used
    assert [
        each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)
    ] == []


def test_an_action_has_one_pin():
    used = {each for workflow in WORKFLOWS for each in re.findall(r"uses: (.*)", workflow.read_text())}
    assert len(used) == len({each.partition("@")[0] for each in used})


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_makes_is_a_verb(workflow: Path):
    verbs = set(re.findall(r"^([\w-]+):.*##", Path("Makefile").read_text(), re.MULTILINE))
    made = [step["run"] for step in steps(workflow) if step.get("run", "").startswith("make ")]
    assert made
    assert {word for each in made for word in each.split()[1:] if "=" not in word} <= verbs


def test_ci_runs_the_checks_on_the_oldest_and_the_newest_python_and_the_oldest_packages():
    project = tomllib.loads(Path("trainer_image/pyproject.toml").read_text())["project"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    ends = [project["requires-python"].removeprefix(">="), versions[-1]]
    ci = jobs(Path(".github/workflows/ci.yml"))
    for name in ("check", "test"):
        assert ci[name]["strategy"]["matrix"]["python"] == ends
    ran = {step["run"] for job in ci.values() for step in job["steps"] if "run" in step}
    assert {"make check", "make test", "make test-oldest", "make e2e"} <= ran


@pytest.mark.parametrize(
    "file", [*WORKFLOWS, *FORMS, RENOVATE, HOOKS, Path("tools/release/publish.sh")], ids=str
)
def test_no_host_is_named(file: Path):
    text = re.sub(r"registry\.example\.com|[\w.]+/\*\*", "", file.read_text())  # an example, and Go's modules
    assert re.findall(r"https?://\S+|\b[\w-]+\.(?:com|io|org|dev|net)\b", text) == []


# --- forms, Renovate, pre-commit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-issue-forms", FORMS),
        ("github-issue-config", [Path(".github/ISSUE_TEMPLATE/config.yml")]),
        ("github-workflows", WORKFLOWS),
        ("renovate", [RENOVATE]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_has_the_form_that_its_reader_wants(schema: str, files: list[Path]):
    words = ["--builtin-schema", f"vendor.{schema}", *map(str, files)]
    main = importlib.import_module("check_jsonschema").main  # it has no types
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == 0, ended.output


def test_renovate_finds_every_program_and_the_base_image():
    found: dict[str, set[str]] = {}
    for manager in json.loads(RENOVATE.read_text())["customManagers"]:
        (pattern,) = manager["matchStrings"]
        pattern = re.sub(r"\(\?<(\w+)>", r"(?P<\1>", pattern)  # JavaScript's names of groups
        for file in manager["managerFilePatterns"]:
            for each in re.finditer(pattern, Path(file).read_text()):
                found.setdefault(each["depName"], set()).add(each["currentValue"])
    modules = {
        each.go_module or each.package.partition("@")[0]: each.version for each in assets.PROGRAMS.values()
    }
    for package, version in modules.items():
        (module,) = [each for each in found if package == each or package.startswith(f"{each}/")]
        assert found[module] == {version}
    assert found["python"] == {"3.11-slim-bookworm"}


@pytest.mark.programs
def test_the_hooks_refuse_what_the_checks_refuse_and_fetch_nothing(tmp_path: Path):
    def called(*command: str | Path) -> subprocess.CompletedProcess[str]:
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            "PRE_COMMIT_HOME": str(tmp_path / "home"),
            "SKIP": "imports,repository",
            "HTTPS_PROXY": "http://127.0.0.1:9",  # nothing listens there
        }
        return subprocess.run(
            command, cwd=clone, env=environ, capture_output=True, text=True, timeout=100, check=False
        )

    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / HOOKS).write_text(HOOKS.read_text())
    (clone / "pyproject.toml").write_text(Path("pyproject.toml").read_text())
    (clone / ".venv").symlink_to(BIN.parent)
    module = clone / "module.py"
    module.write_text('"""A module."""\n\nimport os\nx = [1,2]\n')
    called("git", "init", "--quiet")
    called("git", "add", str(HOOKS), "pyproject.toml", "module.py")
    refused = called(BIN / "pre-commit", "run", "--all-files")
    assert refused.returncode == 1
    assert "`os` imported but unused" in refused.stdout
    assert "1 file would be reformatted" in refused.stdout
    module.write_text('"""A module."""\n\nx = [1, 2]\n')
    called("git", "add", "module.py")
    taken = called(BIN / "pre-commit", "run", "--all-files")
    assert taken.returncode == 0, taken.stdout


def test_the_hooks_call_tools_of_the_environment_or_verbs():
    (repository,) = yaml.safe_load(HOOKS.read_text())["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith((".venv/bin/", "make "))
