"""The page for whoever runs the operator speaks of everything that it may meet."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import fleet_operator.plan.tell.reasons
from fleet_operator.plan.decide.failure_policy import FailReason
from fleet_operator.plan.tell.reasons import ADVICE

PAGE = Path("docs/operations.md").read_text()
SOURCES = Path(inspect.getfile(fleet_operator.plan.tell.reasons)).parents[2]


def reasons_of_waiting() -> set[str]:
    """Return the reasons that `plan/tell/reasons.py` gives."""
    tree = ast.parse(inspect.getsource(fleet_operator.plan.tell.reasons))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "PendingReason"]
    firsts = [call.args[0] for call in named]
    return {str(first.value) for first in firsts if isinstance(first, ast.Constant)}


def warnings() -> set[str]:
    """Return the names of the events that warn, where they stand in the source, and of those of failures."""
    found = {"ReplicaFailed", "ReplicaDisrupted"}
    for path in SOURCES.rglob("*.py"):
        found |= set(re.findall(r'\bEvent\("Warning", "(\w+)"', path.read_text()))
    return found


def test_it_says_what_every_warning_means():
    assert {"ActionRefused", "InvalidSpec"} <= warnings()
    assert {name for name in warnings() if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_the_oldest_cluster_that_the_chart_takes_is_told(page: str):
    chart = Path("charts/fleet-operator/Chart.yaml").read_text()
    oldest = re.search(r'^kubeVersion: ">=(\d+\.\d+)\.0-0"$', chart, re.MULTILINE)
    assert oldest is not None
    assert f"Kubernetes {oldest[1]} or newer" in Path(page).read_text()


def test_it_says_what_to_do_about_every_reason():
    reasons = ADVICE.keys() | {str(each) for each in FailReason} | reasons_of_waiting()
    assert {"NameTaken", "Starting"} <= reasons
    assert {reason for reason in reasons if f"`{reason}`" not in PAGE} == set()
