"""The page of complaints: each has a test of its name that is there, and no story is left out."""

import ast
import re
from pathlib import Path

import pytest

PAGE = Path("docs/complaints.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
STORIES = "tests/unit/fleet_operator/test_complaints.py"

# The issues in which users of other operators complain, of kubeflow/trainer where no project is named.
ISSUES = re.findall(
    r"\S+",
    """
    #774 #657 #661 #999 #1570 #2185 #2000 #2300 kubernetes-sigs/jobset#918 #1129 #2045 #2044 #1579 #2454 #2899
    #4052 #2713 #3671 #2034 kubeflow/pytorch-operator#125 ray-project/kuberay#4760 #1630 #1797 #2903 #1509
    #1706 #829 #2318 #1814 #2872 ray-project/kuberay#3903 #4914 #3429 #3430 nolar/kopf#1276 nolar/kopf#734
    """,
)


def rows() -> list[tuple[str, str]]:
    """Return each complaint and the tests that its row names."""
    found = re.findall(r"^\| ([^|]+) \| [^|]+ \| (.+) \|$", PAGE, re.MULTILINE)
    return [(complaint, tests) for complaint, tests in found if complaint != "complaint"]


def name_of(complaint: str) -> str:
    """Return the name of the test of a complaint: its words, without the issues behind them."""
    words = re.sub(r"\([^)]*\)", "", complaint).lower()
    return "test_" + "_".join(re.findall(r"[a-z0-9]+", words))


def stories_in(path: str) -> set[str]:
    tree = ast.parse(Path(path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {each.name for each in tree.body if isinstance(each, functions) and each.name.startswith("test_")}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_what_it_names_is_a_test(path: str, name: str):
    assert name in stories_in(path)


@pytest.mark.parametrize(("complaint", "tests"), rows())
def test_each_complaint_has_a_test_of_its_name(complaint: str, tests: str):
    assert f"::{name_of(complaint)}`" in tests


@pytest.mark.parametrize("issue", ISSUES)
def test_every_issue_is_answered(issue: str):
    assert [complaint for complaint, _ in rows() if re.search(rf"{re.escape(issue)}\b", complaint)]


def test_it_names_every_story():
    assert stories_in(STORIES) == {name for path, name in NAMED if path == STORIES}
