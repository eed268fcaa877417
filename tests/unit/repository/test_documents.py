"""Every block of code, command and manifest of README.md, CONTRIBUTING.md and docs/ is run by a test.

The tables here name the test of each; that test reads the page, or types the command as it stands there.
"""

import ast
import os
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from fleet_operator import __version__
from tests.support.documents import PAGES, blocks
from tests.support.recipes import recipes
from tools import assets

SHELL = ("sh", "bash")
SHOWN_ONLY = ("", "text", "diff", "mermaid")
"""Listings of folders, lines of a log, pictures, and the README's diff, which test_turns.py compares."""

FIRST_JOB = "docs/first-job.md"
RECIPES = "docs/bring-your-own-script.md"
"""Its blocks have names; tests/unit/repository/test_recipes.py sees to it that each is run."""

CLIENT = "tests/controlplane/test_client.py::test_the_page_s_client"
PAGES_TEST = "tests/runtime/recipes/test_pages.py"
MANIFESTS_TEST = "tests/controlplane/test_documents.py::test_the_api_server_takes_every_manifest_of_the_pages"
COLLECTIVE = "tests/runtime/collective/test_recipes.py"
LOOPS_TEST = f"{COLLECTIVE}::test_every_loop_of_the_page_trains_as_in_one_process"
BUILT_TEST = f"{COLLECTIVE}::test_an_optimizer_of_the_page_averages"
RULES_TEST = "tests/unit/fleet/tables/test_own_rules.py::test_rules_of_one_s_own_work_together"
TLS_TEST = "tests/unit/repository/test_security.py::test_the_certificate_is_made_for_the_servers_of_the_job"
TABLE_TEST = f"{PAGES_TEST}::test_a_table_takes_the_place_of_an_embedding_and_its_rows_are_fetched_ahead"

BLOCKS = {
    ("docs/watching.md", "python"): [
        "tests/unit/fleet/process/test_reporting.py::test_the_reporter_of_the_page_is_installed_as_the_page_says"
    ],
    ("docs/watching.md", "toml"): [
        "tests/unit/fleet/process/test_reporting.py::test_the_reporter_of_the_page_is_installed_as_the_page_says"
    ],
    ("docs/watching.md", "yaml"): [
        "tests/runtime/local/test_reporters.py::test_the_pages_reporters_are_there"
    ],
    ("docs/first-job.md", "yaml"): [
        "tests/runtime/local/test_digits.py::test_digits_trains_from_its_manifest"
    ],
    ("docs/checkpoints.md", "python"): [
        f"{PAGES_TEST}::test_a_job_goes_on_from_its_newest_checkpoint",
        f"{COLLECTIVE}::test_a_job_with_a_gradscaler_goes_on_to_the_bit_after_its_trainers_were_killed",
        f"{PAGES_TEST}::test_most_saves_of_a_job_with_tables_are_of_what_has_changed",
    ],
    ("docs/checkpoints.md", "yaml"): [MANIFESTS_TEST, MANIFESTS_TEST, MANIFESTS_TEST],
    ("docs/client.md", "python"): [f"{CLIENT}_submits_waits_and_deletes", f"{CLIENT}_waits_for_many_jobs"],
    ("docs/collective.md", "python"): [
        BUILT_TEST,
        LOOPS_TEST,
        LOOPS_TEST,
        BUILT_TEST,
        LOOPS_TEST,
        "tests/runtime/collective/test_two_optimizers.py::test_a_gan_with_two_optimizers_trains_as_in_one_process",
        LOOPS_TEST,
        LOOPS_TEST,
    ],
    ("docs/local.md", "yaml"): [
        "tests/runtime/local/test_volumes.py::test_the_manifest_and_the_command_of_the_page"
    ],
    ("docs/local.md", "json"): [
        "tests/unit/fleet_operator/cli/test_view.py::test_the_page_shows_the_object_of_a_run"
    ],
    ("docs/loops.md", "python"): [
        "tests/unit/fleet/loop/test_loop.py::test_the_loop_of_the_documentation_goes_on_in_the_middle"
    ],
    ("docs/modes.md", "python"): [f"{PAGES_TEST}::test_a_mode_of_one_s_own_trains"],
    ("docs/paddle.md", "python"): [
        "tests/runtime/collective/test_programs.py::test_the_program_of_the_page_about_paddle_is_run"
    ],
    ("docs/policies.md", "yaml"): [MANIFESTS_TEST, MANIFESTS_TEST],
    ("docs/row-options.md", "python"): [
        f"{PAGES_TEST}::test_options_of_a_table_are_carried_out",
        f"{PAGES_TEST}::test_options_of_a_table_are_carried_out",
        RULES_TEST,
        RULES_TEST,
        RULES_TEST,
    ],
    ("docs/row-options.md", "yaml"): [MANIFESTS_TEST],
    ("docs/security.md", "yaml"): [MANIFESTS_TEST, TLS_TEST, TLS_TEST],
    ("docs/tables.md", "python"): [TABLE_TEST, TABLE_TEST],
    ("docs/transpiler.md", "python"): [
        f"{PAGES_TEST}::test_the_transpiler_gives_the_programs_of_every_replica",
        f"{PAGES_TEST}::test_servers_are_given_weights_that_a_script_writes",
        f"{PAGES_TEST}::test_two_networks_of_one_optimizer_have_learning_rates_of_their_own",
    ],
}
"""The test of each block of a language, in the order of the page."""

IMAGES_TEST = (
    "tests/unit/repository/test_documents.py::test_the_images_that_are_pushed_are_those_that_the_chart_runs"
)
RELEASES = "tests/controlplane/test_chart.py"
UNINSTALL_TEST = "tests/e2e/test_uninstall.py::test_uninstalling_the_chart_leaves_nothing_behind"
COMMANDS = {
    "R=": IMAGES_TEST,
    "docker push": IMAGES_TEST,
    "make image OPERATOR_IMAGE": IMAGES_TEST,
    "make publish": ("tests/unit/repository/test_release.py::test_what_is_pushed_is_signed_by_its_digest"),
    "helm install fleet-operator": f"{RELEASES}::test_every_installation_of_the_page_is_one",
    "helm install fleet ": f"{RELEASES}::test_every_installation_of_the_page_is_one",
    "helm test": "tests/e2e/test_upgrade.py::test_a_job_is_not_disturbed_by_what_happens_to_its_operator",
    "helm rollback": "tests/e2e/test_upgrade.py::test_a_job_is_not_disturbed_by_what_happens_to_its_operator",
    "helm uninstall": UNINSTALL_TEST,
    "helm upgrade": "tests/controlplane/test_election.py::test_an_upgrade_leaves_the_lease_to_its_holder",
    "kubectl apply": "tests/e2e/test_examples.py::test_the_job_succeeds_at_the_first_attempt",
    "kubectl wait": "tests/controlplane/test_life.py::test_a_job_runs_succeeds_and_is_cleaned_up",
    "kubectl fleet": "tests/controlplane/test_cli.py::test_it_is_a_plugin_of_kubectl_too",
    "python examples/": (
        "tests/runtime/examples/test_alone.py::test_an_example_trains_as_one_trainer_with_one_server_does"
    ),
    "python -m fleet.launch_ps": (
        "tests/runtime/examples/test_examples.py::"
        "test_digits_learns_with_parameter_servers_and_data_loaders_that_fork"
    ),
    "python -m fleet.launch ": (
        "tests/runtime/examples/test_examples.py::test_collective_learns_by_averages"
    ),
    "pip install dist/": "tests/runtime/wheels/test_wheels.py::test_the_command_line_starts",
    "fleetjob submit": "tests/controlplane/test_cli.py::test_submit_waits_for_the_end_and_tells_the_truth",
    "fleetjob status -w": "tests/controlplane/test_cli.py::test_on_a_terminal_status_watch_is_a_live_table",
    "fleetjob logs -f": "tests/controlplane/test_cli.py::test_logs_of_all_replicas_are_merged_and_followed",
    "fleetjob events": "tests/controlplane/test_cli.py::test_suspend_and_resume",
    "fleetjob ui": "tests/runtime/local/test_ui.py::test_the_page_follows_a_run_from_its_restart_to_its_end",
    "fleetjob run": "tests/runtime/local/test_volumes.py::test_the_manifest_and_the_command_of_the_page",
    "export FLEET_JOB_KEY": "tests/unit/repository/test_security.py::test_the_key_of_the_page_is_one",
}
"""The test that runs a command, by what the command begins with."""


def commands(page: str) -> list[str]:
    """Return the commands of a page's blocks of shell, without comments."""
    lines = (line for each in blocks(page) if each.language in SHELL for line in each.code.splitlines())
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


TYPED = [(page, each) for page in PAGES for each in commands(page)]
MADE = [(page, each) for page, each in TYPED if each.startswith("make ") and "=" not in each]
OTHERS = [each for each in TYPED if each not in MADE]


@cache
def functions(path: str) -> set[str]:
    """Return the names of the functions of a file of tests."""
    tree = ast.parse(Path(path).read_text())
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def assert_is_a_test(name: str) -> None:
    path, _, function = name.partition("::")
    assert function in functions(path)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_its_test(page: str):
    languages = {each.language for each in blocks(page)} - {*SHELL, *SHOWN_ONLY}
    if page == RECIPES:
        assert len(recipes()) == sum(each.language not in SHOWN_ONLY for each in blocks(page))
        return
    for language in languages:
        tests = BLOCKS.get((page, language), [])
        shown = [each.section for each in blocks(page) if each.language == language]
        assert len(tests) == len(shown), (
            f"name the tests of {page}'s blocks of {language}, which are in {shown}"
        )
        for name in tests:
            assert_is_a_test(name)
            if name != MANIFESTS_TEST and page != FIRST_JOB:
                assert Path(page).name in Path(name.partition("::")[0]).read_text()


@pytest.mark.parametrize(("page", "command"), MADE)
def test_every_verb_is_in_the_makefile(page: str, command: str):
    verbs = re.findall(r"^([\w-]+):.*##", Path("Makefile").read_text(), re.MULTILINE)
    assert set(command.split()[1:]) <= set(verbs)


@pytest.mark.parametrize(("page", "command"), OTHERS)
def test_every_command_has_its_test(page: str, command: str):
    tests = [test for prefix, test in COMMANDS.items() if command.startswith(prefix)]
    assert tests, f"{page}: no test is named that runs {command!r}"
    assert_is_a_test(tests[0])


def test_the_demo_is_the_run_of_the_manifest_of_the_first_job():
    recipe = re.search(r"^demo:.*\n\t(.*)$", Path("Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1].endswith("fleetjob run -f examples/digits/fleetjob.yaml")
    assert "<!-- file: examples/digits/fleetjob.yaml -->" in Path(FIRST_JOB).read_text()


@pytest.mark.parametrize("path", sorted(Path("examples").glob("*/fleetjob*.yaml")), ids=str)
def test_manifests_name_the_image_that_make_image_builds(path: Path):
    assert f"image: fleet-trainer:{__version__}\n" in path.read_text()
    assert "TRAINER_IMAGE ?= fleet-trainer:$(VERSION)\n" in Path("Makefile").read_text()


@pytest.mark.programs
def test_the_images_that_are_pushed_are_those_that_the_chart_runs(tmp_path: Path):
    """docker only notes what it is told, because there is no registry to push to; make and helm are real."""
    [pushing] = [each.code for each in blocks("docs/operations.md") if "docker push" in each.code]
    noted = tmp_path / "noted"
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$@" >>{shlex.quote(str(noted))}\n')
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "helm").symlink_to(assets.find(["helm"])["helm"])
    block = pushing.replace("helm install", f"helm template --kube-version {assets.KUBERNETES}")
    ended = subprocess.run(
        ["bash", "-euc", block],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DOCKER": "docker"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told = noted.read_text().splitlines()
    built = [re.findall(r"--tag (\S+)", each)[0] for each in told if each.startswith("build")]
    assert built == [each.removeprefix("push ") for each in told if each.startswith("push")]
    # The operator's, and that of the pod of `helm test`.
    assert re.findall(r"^ +image: \"?([^\"\n]+)\"?$", ended.stdout, re.MULTILINE) == [built[0]] * 2
