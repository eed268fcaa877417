"""The page for whoever runs the operator speaks of everything that it may meet."""

import ast
import inspect
from pathlib import Path

import fleet_operator.plan.waiting
from fleet_operator.plan.advice import ADVICE
from fleet_operator.plan.restart import FailReason

PAGE = Path("docs/operations.md").read_text()


def reasons_of_waiting() -> set[str]:
    """Return the reasons that `plan/waiting.py` gives."""
    tree = ast.parse(inspect.getsource(fleet_operator.plan.waiting))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Waiting"]
    firsts = [call.args[0] for call in named]
    return {str(first.value) for first in firsts if isinstance(first, ast.Constant)}


def test_it_says_what_to_do_about_every_reason():
    reasons = ADVICE.keys() | {str(each) for each in FailReason} | reasons_of_waiting()
    assert {"NameTaken", "Starting"} <= reasons
    assert {reason for reason in reasons if f"`{reason}`" not in PAGE} == set()
