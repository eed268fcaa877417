"""What cannot succeed is not tried seven times; what may go better is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fleet_operator.plan.permanent import permanent_error, raised_at
from tests.support import jobs
from tests.support.afterwards import DESTROY, TERMINATE, TRACKER
from tests.support.plans import Story, at, ended, pserver, trainer

MISSING = "Traceback (most recent call last):\n  …\nModuleNotFoundError: No module named 'x'"
PODS = (pserver(0), pserver(1), trainer(0))
MODULE = "ModuleNotFoundError: No module named 'x'"
HELP = "; trying again would not help; correct the script, its command or its image and create the job again"


def words(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the last words of this interpreter."""
    told = subprocess.run(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return told.returncode, told.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(["-c", "import no_such"], "ModuleNotFoundError: No module named 'no_such'", id="import"),
        pytest.param(["-c", "x = (1"], "SyntaxError: '(' was never closed", id="the-script-does-not-parse"),
        pytest.param(["-m", "no_such"], "No module named no_such", id="module"),
        pytest.param(["no-such.py"], "can't open file", id="file"),
        pytest.param(["-c", "input()"], "EOFError: EOF when reading a line", id="it-asks-a-person"),
        pytest.param(["-c", "eval('(1')"], None, id="a-text-does-not-parse"),
        pytest.param(["-c", "import ast; ast.literal_eval('(1')"], None, id="data-does-not-parse"),
        pytest.param(["-c", "import pickle, io; pickle.load(io.BytesIO())"], None, id="data-ends-too-soon"),
        pytest.param(["-c", "open('/no/such')"], None, id="a-file-that-it-opens-is-not-there"),
        pytest.param(["-c", "raise ConnectionRefusedError(111, 'refused')"], None, id="a-peer-refuses"),
        pytest.param(["-c", "import sys; sys.exit('ImportError')"], None, id="only-a-word"),
    ],
)
def test_what_python_says(arguments, error):
    code, said = words(*arguments)
    assert code in (1, 2), said
    found = permanent_error(code, "Error", said)
    assert found == error if error is None else (found or "").startswith(error)


@pytest.mark.parametrize(
    ("code", "reason", "said", "error"),
    [
        pytest.param(
            1,
            "Error",
            "trainer 0 (not joined): ImportError: cannot import name 'f' from 'g' (at train.py:3)",
            "ImportError: cannot import name 'f' from 'g' (at train.py:3)",
            id="in-the-words-of-fleet",
        ),
        pytest.param(
            1,
            "Error",
            "Traceback (most recent call last):\n …\nworker 3 failed with exit status 1: ImportError: no 'f'",
            "ImportError: no 'f'",
            id="in-the-words-of-a-launcher",
        ),
        pytest.param(
            2,
            "Error",
            "worker 0 failed with exit status 2: python: can't open file '/x.py': [Errno 2] No such file",
            "can't open file '/x.py': [Errno 2] No such file",
            id="a-file-in-the-words-of-a-launcher",
        ),
        pytest.param(
            1,
            "Error",
            "trainer 0 (joined): SyntaxError: '(' was never closed (<string>, line 1) (at train.py:3)",
            None,
            id="data-in-the-words-of-fleet",
        ),
        pytest.param(
            128,
            "StartError",
            'failed to create containerd task: OCI runtime create failed: exec: "pyton": executable file not'
            " found in $PATH: unknown",
            'pyton": executable file not found',
            id="a-containers-command-is-not-found",
        ),
        pytest.param(
            128,
            "StartError",
            'error mounting "/data": no such file or directory',
            None,
            id="a-mount-may-come",
        ),
        pytest.param(127, "Error", "sh: 1: tran: not found", "sh: 1: tran: not found", id="a-shell"),
        pytest.param(1, "Error", "sh: 1: tran: not found", None, id="a-shell-that-went-on"),
        pytest.param(137, "OOMKilled", MISSING, None, id="it-was-killed"),
        pytest.param(
            1, "Error", "socket.gaierror: [Errno -3] Temporary failure in name resolution", None, id="a-name"
        ),
        pytest.param(1, "Error", None, None, id="it-said-nothing"),
    ],
)
def test_what_others_say(code, reason, said, error):
    assert permanent_error(code, reason, said) == error


MISSED = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in main
    import x
ModuleNotFoundError: No module named 'x'
"""
BY_RANK = "".join(f"[rank0]: {line}\n" for line in MISSED.splitlines())
EVALUATED = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/work/train.py", line 3, in main
[rank0]:     eval("(1")
[rank0]:   File "<string>", line 1
[rank0]:     (1
[rank0]:     ^
[rank0]: SyntaxError: '(' was never closed
"""
PASSED_OVER = """\
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "/work/pool.py", line 9, in __del__
TypeError: 'NoneType' object is not callable
"""


@pytest.mark.parametrize(
    ("code", "said", "found"),
    [
        pytest.param(1, BY_RANK, True, id="behind-the-rank"),
        pytest.param(1, BY_RANK + DESTROY + TRACKER, True, id="before-what-torch-and-python-say-of-an-end"),
        pytest.param(1, MISSED + PASSED_OVER, True, id="before-what-python-passes-over"),
        pytest.param(134, BY_RANK + TERMINATE, True, id="before-its-threads-aborted"),
        pytest.param(
            134, f"{BY_RANK}{TERMINATE}worker 1 was ended by signal 6: {MODULE}", True, id="in-a-worker"
        ),
        pytest.param(1, f"{MISSED}x is not used\nno data", False, id="of-a-script-that-went-on"),
        pytest.param(
            1,
            f"{MISSED}no data\nworker 1 failed with exit status 1: {MODULE}",
            False,
            id="of-a-worker-that-went-on",
        ),
        pytest.param(1, EVALUATED, False, id="of-a-text-that-does-not-parse"),
    ],
)
def test_the_exception_counts_if_it_has_ended_the_script(code, said, found):
    assert permanent_error(code, "Error", said) == (MODULE if found else None)


def test_on_one_machine_the_first_end_fails_the_job():
    lines = Story().sees(*PODS, ended(trainer(1), 1, message=MISSING), one_machine=True)
    told = "digits-trainer-1 failed with exit code 1: ModuleNotFoundError: No module named 'x'"
    assert f"Failed True PermanentError: {told}{HELP}" in lines


def after_one_end(*pods, **fields):
    """Tell of a trainer that ended so once, on a cluster, and of what is seen then."""
    story = Story()
    story.sees(*PODS, trainer(1))
    first = story.sees(*PODS, ended(trainer(1), 1, message=MISSING))
    assert first[0].startswith("Restarting "), "another node may have what it imports"
    story.sees(*PODS, after=2)
    return story.sees(*PODS, *pods, after=3, **fields)


def test_on_a_cluster_two_equal_ends_fail_the_job():
    lines = after_one_end(ended(trainer(1, "0.1"), 1, message=MISSING))
    told = "digits-trainer-1 failed with exit code 1: ModuleNotFoundError: No module named 'x'"
    assert f"Failed True PermanentError: {told}{HELP}" in lines


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(ended(trainer(1, "0.1"), 1, message=MISSING.replace("x", "y")), id="other-words"),
        pytest.param(ended(trainer(1, "0.1"), 3, message=MISSING), id="another-exit-code"),
        pytest.param(ended(trainer(1, "0.1"), 1), id="no-words"),
    ],
)
def test_on_a_cluster_two_different_ends_fail_no_job(second):
    assert after_one_end(second)[0].startswith("Restarting ")


def test_two_trainers_that_end_so_at_once_are_tried_again():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    both = [ended(trainer(index), 1, message=MISSING) for index in (0, 1)]
    story.sees(pserver(0), pserver(1), trainer(0), both[1])
    assert story.sees(pserver(0), pserver(1), *both)[0].startswith("Restarting ")


def test_a_name_server_that_hiccups_twice_fails_no_job():
    said = "socket.gaierror: [Errno -3] Temporary failure in name resolution"
    story = Story()
    story.sees(*PODS, trainer(1))
    for life in range(3):
        pods = (*PODS, ended(trainer(1, f"0.{life}"), 1, message=said))
        assert story.sees(*pods, after=100 * life)[0].startswith("Restarting ")


def test_a_rule_that_names_the_exit_code_decides_first():
    rules = [{"onExitCodes": [1], "action": "RestartJob"}]
    story = Story(jobs.manifest(failurePolicy={"rules": rules}))
    lines = story.sees(*PODS, ended(trainer(1), 1, message=MISSING), one_machine=True)
    assert lines[0].startswith("Restarting ")


RAISED = """\
Traceback (most recent call last):
  File "/work/train.py", line 30, in <module>
    main()
  File "/work/train.py", line 12, in main
    raise ValueError(f"{time()}: no such column")
ValueError: 17.2: no such column
"""
IN_WORDS = "trainer 1 ({stage}): ValueError: 17.2: no such column (at /work/train.py:12)"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(RAISED, "ValueError at /work/train.py:12", id="a-traceback"),
        pytest.param(IN_WORDS.format(stage="joined"), "ValueError at /work/train.py:12", id="words-of-fleet"),
        pytest.param("\n".join(RAISED.splitlines()[3:]), "ValueError at /work/train.py:12", id="its-end"),
        pytest.param(
            RAISED.replace("ValueError: 17.2", "module.Odd: 1"), "module.Odd at /work/train.py:12", id="own"
        ),
        pytest.param(RAISED.replace("ValueError: 17.2: no", "ConnectionError: no"), None, id="a-connection"),
        pytest.param(RAISED.replace("no such column", "the store timed out"), None, id="a-peer-that-is-late"),
        pytest.param("no such column", None, id="no-exception"),
        pytest.param("trainer 1 (joined): the folder x holds no data", None, id="an-error-of-fleet"),
        pytest.param(None, None, id="nothing"),
    ],
)
def test_an_exception_is_known_by_its_kind_and_its_line(said, expected):
    assert raised_at(said) == expected


def two_lives(first, second, *, one_machine=True, code=1, seconds=5):
    """Tell of a trainer that ended so in its first life, and so in its second one."""
    story = Story()
    story.sees(*PODS, trainer(1), one_machine=one_machine)
    lines = story.sees(*PODS, ended(trainer(1), code, message=first), one_machine=one_machine)
    assert lines[0].startswith("Restarting "), "once may be chance"
    story.sees(*PODS, after=2, one_machine=one_machine)
    again = ended(trainer(1, "0.1"), code, message=second, started_at=at(0), finished_at=at(seconds))
    return story.sees(*PODS, again, after=3, one_machine=one_machine)


LATER = RAISED.replace("17.2", "19.4")
IDLE, NOT_JOINED = IN_WORDS.format(stage="joined, no step made"), IN_WORDS.format(stage="not joined")


@pytest.mark.parametrize(
    ("first", "second"),
    [(RAISED, LATER), (IDLE, IDLE), (NOT_JOINED, IDLE)],
    ids=["a-plain-script", "joined", "both"],
)
def test_on_one_machine_the_second_exception_at_a_line_before_any_step_fails_the_job(first, second):
    [failed] = [line for line in two_lives(first, second) if line.startswith("Failed True PermanentError: ")]
    assert "no such column (at /work/train.py:12); the same exception has ended this run before" in failed


@pytest.mark.parametrize(
    ("second", "options"),
    [
        pytest.param(LATER, {"one_machine": False}, id="on-a-cluster"),
        pytest.param(LATER.replace("line 12", "line 13"), {}, id="at-another-line"),
        pytest.param(LATER.replace("ValueError:", "KeyError:"), {}, id="of-another-kind"),
        pytest.param(IN_WORDS.format(stage="joined"), {}, id="after-a-step"),
        pytest.param(LATER, {"seconds": 120}, id="of-a-plain-script-that-ran-for-long"),
        pytest.param(LATER, {"code": 91}, id="a-peer-that-was-lost"),
        pytest.param(LATER, {"code": 90}, id="state-that-was-lost"),
    ],
)
def test_other_second_ends_are_tried_again(second, options):
    assert two_lives(RAISED, second, **options)[0].startswith("Restarting ")
