"""Whatever the README tells people to type is run by a test, and exists."""

import ast
import re
from pathlib import Path

import pytest

README = Path("README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
RUN_BY = {
    "helm install": "tests/e2e/test_uninstall.py::test_uninstalling_the_chart_leaves_nothing_behind",
    "kubectl apply": "tests/e2e/test_examples.py::test_the_job_succeeds_at_the_first_attempt",
    "kubectl wait": "tests/controlplane/test_life.py::test_a_job_runs_succeeds_and_is_cleaned_up",
    "python -m fleet.launch_ps": (
        "tests/runtime/examples/test_examples.py::test_digits_learns_with_parameter_servers_and_data_loaders_that_fork"
    ),
    "python -m fleet.launch ": (
        "tests/runtime/examples/test_examples.py::test_collective_learns_by_averages"
    ),
    "fleetjob submit": ("tests/controlplane/test_cli.py::test_submit_waits_for_the_end_and_tells_the_truth"),
    "fleetjob status -w": ("tests/controlplane/test_cli.py::test_on_a_terminal_status_watch_is_a_live_table"),
    "fleetjob logs -f": ("tests/controlplane/test_cli.py::test_logs_of_all_replicas_are_merged_and_followed"),
    "fleetjob run": "tests/runtime/local/test_digits.py::test_digits_trains_from_its_manifest",
}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("make ")])
def test_every_verb_is_in_the_makefile(command: str) -> None:
    verbs = re.findall(r"^([\w-]+):.*##", Path("Makefile").read_text(), re.MULTILINE)
    assert set(command.split()[1:]) <= set(verbs)


@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.startswith("make ")])
def test_every_command_is_run_by_a_test(command: str) -> None:
    tests = [test for prefix, test in RUN_BY.items() if command.startswith(prefix)]
    assert tests, f"no test is named that runs {command!r}"
    path, _, name = tests[0].partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in functions


def test_the_demo_is_the_run_of_the_manifest_that_the_readme_shows() -> None:
    recipe = re.search(r"^demo:.*\n\t(.*)$", Path("Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1].endswith("fleetjob run -f examples/digits/fleetjob.yaml")
    assert "<!-- file: examples/digits/fleetjob.yaml -->" in README


@pytest.mark.parametrize("path", sorted(Path("examples").glob("*/fleetjob*.yaml")), ids=str)
def test_manifests_name_the_image_that_make_image_builds(path: Path) -> None:
    makefile = Path("Makefile").read_text()
    version = re.search(r"^VERSION := (.*)$", makefile, re.MULTILINE)
    assert version is not None
    assert f"image: fleet-trainer:{version[1]}\n" in path.read_text()
    assert "TRAINER_IMAGE ?= fleet-trainer:$(VERSION)\n" in makefile
