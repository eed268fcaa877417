"""What a pod says as it ends, and what a person is told of it; it may say anything."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fleet_operator.plan.observe.termination_message import (
    MOST_TRAINERS,
    LastWords,
    find_root_cause,
    last_sentence,
    parse_words,
    permanent_error,
    raised_at,
)
from tests.support import jobs
from tests.support.afterwards import DESTROY, TERMINATE, TRACKER
from tests.support.plans import Story, at, ended, pserver, trainer

DONE = {"step": 12, "joined": True, "completedTrainers": "0-1,3"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(json.dumps(DONE), LastWords(True, frozenset({0, 1, 3})), id="who-has-completed"),
        pytest.param('{"joined": true, "step": 3}', LastWords(True), id="nobody-that-it-knows-of"),
        pytest.param('{"joined": false}', LastWords(False), id="one-that-ended-before-it-had-joined"),
        pytest.param(
            "trainer 1 (joined): its disk is full", LastWords(True, stepped=True), id="a-failure-at-work"
        ),
        pytest.param(
            "trainer 1 (joined, no step made): x", LastWords(True, stepped=False), id="before-its-first-step"
        ),
        pytest.param(
            "pserver 0 (not joined): no port", LastWords(False, stepped=False), id="a-failure-before-any"
        ),
        pytest.param("usage: train.py [-h]\ntrainer 1 (joined): x", LastWords(), id="a-log-that-quotes-one"),
        pytest.param(None, LastWords(), id="nothing"),
        pytest.param('{"step": 12, "completedTrainers": "0-1"}', LastWords(), id="another-runtimes-json"),
        pytest.param("[" * 4000, LastWords(), id="deep-brackets"),
        pytest.param('["joined"]', LastWords(), id="a-list"),
        pytest.param('{"joined": "true"}', LastWords(), id="a-text-for-a-truth"),
        pytest.param('{"joined": true, "completedTrainers": 7}', LastWords(True), id="a-number"),
        pytest.param('{"joined": true, "completedTrainers": "1-"}', LastWords(True), id="half-a-range"),
        pytest.param('{"joined": true, "completedTrainers": "-1"}', LastWords(True), id="a-negative"),
        pytest.param('{"joined": true, "completedTrainers": "5-2"}', LastWords(True), id="a-range-backwards"),
        pytest.param(
            '{"joined": true, "completedTrainers": "٣"}', LastWords(True), id="another-scripts-digit"
        ),
    ],
)
def test_parse_words(message: str | None, expected: LastWords):
    assert parse_words(message) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param({"0": "0-1", "12": "3"}, {0: 0, 1: 0, 3: 12}, id="each-trainer"),
        pytest.param({"-1": "0", "": "1", "x": "2", "9" * 10: "3"}, {}, id="no-counts"),
        pytest.param({"1": ["0"]}, {}, id="no-text"),
        pytest.param(["0"], {}, id="a-list"),
    ],
)
def test_after_how_many_restarts_a_server_knew_trainers(after: object, expected: dict[int, int]):
    assert parse_words(json.dumps(DONE | {"completedAfter": after})).restarts == expected


def test_a_list_of_endless_ranges_costs_nothing():
    ranges = ",".join(["0-99999"] * 500)
    words = parse_words(json.dumps(DONE | {"completedTrainers": ranges}))
    assert words.completed == frozenset(range(MOST_TRAINERS))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param('{"joined":true,"step":3}', "", id="of-a-replica"),
        pytest.param('{"role":"TRAINER","index":0,"step":3,"loss":0.5}\n', "", id="of-a-plain-script"),
        pytest.param('{"step":3}', '{"step":3}', id="of-another-runtime"),
        pytest.param('["role", "step"]', '["role", "step"]', id="a-list"),
    ],
)
def test_progress_is_no_sentence_about_a_failure(message: str, said: str):
    assert last_sentence(message) == said


TRACE = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    main()
train.NoData: label 1001 is out of range
"""


BY_RANK = "".join(f"[rank0]: {line}\n" for line in TRACE.splitlines())


NO_DATA = "train.NoData: label 1001 is out of range"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param(TRACE, NO_DATA, id="at-the-end"),
        pytest.param(BY_RANK, NO_DATA, id="behind-the-rank"),
        pytest.param(BY_RANK + TERMINATE, NO_DATA, id="before-an-abort"),
        pytest.param(BY_RANK + DESTROY, NO_DATA, id="before-a-warning-of-torch"),
        pytest.param(TRACE + TRACKER, NO_DATA, id="before-a-warning-of-python"),
        pytest.param(TRACE + "epoch 3\nshape (3, 4)\n", NO_DATA, id="whose-text-has-several-lines"),
        pytest.param(
            TRACE + "\nDuring\n\n" + TRACE.replace("1001", "7"), NO_DATA.replace("1001", "7"), id="of-two"
        ),
        pytest.param(
            TRACE + "Exception ignored in: <f>\n" + TRACE.replace("1001", "7"),
            NO_DATA,
            id="not-what-is-passed-over",
        ),
        pytest.param(TRACE + "epoch\n" * 50 + "Killed", "Killed", id="not-one-of-long-ago"),
        pytest.param(
            TRACE + "worker 1 failed with exit status 1: no data",
            "worker 1 failed with exit status 1: no data",
            id="not-before-the-sentence-of-a-launcher",
        ),
        pytest.param(TRACE + "trainer 0 (joined): no disk", "no disk", id="not-before-that-of-a-replica"),
        pytest.param(
            "Extension modules: numpy (total: 1)\n[rank1]: RuntimeError: x",
            "RuntimeError: x",
            id="without-a-head",
        ),
        pytest.param(
            "ain\n    raise KeyError(3)\nKeyError: 3\n" + TRACKER, "KeyError: 3", id="whose-head-is-cut-off"
        ),
        pytest.param(
            "  + Exception Group Traceback (most recent call last):\n"
            '  |   File "x", line 3, in <module>\n'
            "  | ExceptionGroup: two (2 sub-exceptions)\n"
            "  +-+---------------- 1 ----------------\n"
            "    | ValueError: a\n    +------------------------------------\n",
            "+------------------------------------",
            id="not-a-frame-of-a-group",
        ),
    ],
)
def test_the_exception_is_the_sentence(message: str, said: str):
    assert last_sentence(message) == said


TWO_AT_ONCE = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    main()
Traceback (most recent call last):
  File "/work/train.py", line 2, in main
  File "/work/train.py", line 3, in <module>
    raise ValueError("the learning rate is -1, expected > 0")
ValueError: the learning rate is -1, expected > 0
    main()
  File "/work/train.py", line 2, in main
    raise ValueError("the learning rate is -1, expected > 0")
ValueError: the learning rate is -1, expected > 0
"""


BY_RANK_TORCHRUN = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/work/train.py", line 4, in <module>
[rank0]:     raise KeyError("train")
[rank0]: KeyError: 'train'
[rank1]: Traceback (most recent call last):
[rank1]:   File "/work/train.py", line 5, in <module>
[rank1]:     d.barrier()
[rank1]: RuntimeError: Connection closed by peer
"""


CUT = """\
 main
    raise train.NoData(
train.NoDataError: the folder is empty
"""


BLANK = " "  # at a line's end, as torchrun leaves it


OWN = f"""\
E1122 16:24:02.145000 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 10, in <module>
    sys.exit(main())
             ^^^^^^
  File "/usr/local/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 386, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:{BLANK}
"""


RULE = "=" * 60


HEAD = f"""\
{RULE}
train.py FAILED
{"-" * 60}
Failures:
[1]:
  time      : 2026-11-22_16:24:02
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 8008)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 8008
{"-" * 60}
"""


ROOT = f"""\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_16:24:02
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 8007){BLANK}
  error_file: <N/A>
  traceback :{BLANK}"""


UNKNOWN = f"{ROOT}To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n{RULE}"


SIGNAL = f"{ROOT}Signal 9 (SIGKILL) received by PID 8007\n{RULE}"


ABORTED = f"{ROOT}Signal 6 (SIGABRT) received by PID 8007\n{RULE}"


RECORDED = f"""\
{ROOT}Traceback (most recent call last):
    File "/work/train.py", line 7, in main
      raise ValueError("the learning rate is -1, expected > 0\\nsee its help: --lr")
  ValueError: the learning rate is -1, expected > 0
  see its help: --lr
  {BLANK}
{RULE}"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param(
            TWO_AT_ONCE + OWN + HEAD + UNKNOWN,
            "rank 0: ValueError: the learning rate is -1, expected > 0",
            id="tracebacks-of-two-processes-that-are-mixed",
        ),
        pytest.param(
            BY_RANK_TORCHRUN + OWN + HEAD + UNKNOWN,
            "rank 0: KeyError: 'train'",
            id="the-rank-that-failed-first-and-not-the-one-that-missed-it",
        ),
        pytest.param(
            CUT + OWN + HEAD + UNKNOWN,
            "rank 0: train.NoDataError: the folder is empty",
            id="a-traceback-whose-head-is-cut-off",
        ),
        pytest.param(
            TWO_AT_ONCE + OWN + HEAD + SIGNAL,
            "rank 0: Signal 9 (SIGKILL) received by PID 8007",
            id="a-signal",
        ),
        pytest.param(
            BY_RANK_TORCHRUN + OWN + HEAD + ABORTED,
            "rank 0: KeyError: 'train'",
            id="an-exception-whose-threads-then-aborted",
        ),
        pytest.param(
            TWO_AT_ONCE + OWN + HEAD + ABORTED,
            "rank 0: ValueError: the learning rate is -1, expected > 0",
            id="an-exception-of-nobody-knows-whom-before-it-aborted",
        ),
        pytest.param(
            OWN + HEAD + ABORTED,
            "rank 0: Signal 6 (SIGABRT) received by PID 8007",
            id="one-that-aborted-without-an-exception",
        ),
        pytest.param(
            OWN + HEAD + RECORDED,
            "rank 0: ValueError: the learning rate is -1, expected > 0",
            id="an-exception-that-was-recorded",
        ),
        pytest.param(
            RECORDED.partition("Root Cause")[2],
            "ValueError: the learning rate is -1, expected > 0",
            id="a-summary-that-is-cut-off",
        ),
        pytest.param(
            OWN + HEAD + UNKNOWN,
            "rank 0: exit code 1; its exception is in the log above torchrun's summary, and here too if "
            "main() is decorated with torch.distributed.elastic.multiprocessing.errors.record",
            id="no-exception-in-what-is-left",
        ),
    ],
)
def test_find_root_cause(log: str, expected: str):
    assert find_root_cause(log) == expected
    assert last_sentence(log) == expected


@pytest.mark.parametrize("log", ["", "\n", "ValueError: x", f"Title\n{RULE}", "==="])
def test_other_logs_have_none(log: str):
    assert find_root_cause(log) == ""


MISSING = "Traceback (most recent call last):\n  …\nModuleNotFoundError: No module named 'x'"


PODS = (pserver(0), pserver(1), trainer(0))


MODULE = "ModuleNotFoundError: No module named 'x'"


HELP = "; a retry would fail again; correct the script, its command or its image and create the job again"


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


MISSED_BY_RANK = "".join(f"[rank0]: {line}\n" for line in MISSED.splitlines())


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
        pytest.param(1, MISSED_BY_RANK, True, id="behind-the-rank"),
        pytest.param(
            1, MISSED_BY_RANK + DESTROY + TRACKER, True, id="before-what-torch-and-python-say-of-an-end"
        ),
        pytest.param(1, MISSED + PASSED_OVER, True, id="before-what-python-passes-over"),
        pytest.param(134, MISSED_BY_RANK + TERMINATE, True, id="before-its-threads-aborted"),
        pytest.param(
            134,
            f"{MISSED_BY_RANK}{TERMINATE}worker 1 was ended by signal 6: {MODULE}",
            True,
            id="in-a-worker",
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
    rules = [
        {"name": "codes-restartjob", "onExitCodes": {"operator": "In", "values": [1]}, "action": "RestartJob"}
    ]
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


@pytest.mark.parametrize(
    "error",
    [
        "BrokenPipeError: [Errno 32] Broken pipe",
        "OSError: [Errno 113] No route to host",
        "OSError: [Errno 98] Address already in use",
        "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
        "http.client.IncompleteRead: IncompleteRead(5 bytes read)",
        "ssl.SSLEOFError: EOF occurred in violation of protocol (_ssl.c:1129)",
    ],
)
def test_what_a_peer_or_a_network_does_is_not_taken_for_the_scripts_own_error(error):
    assert raised_at(RAISED.replace("ValueError: 17.2: no such column", error)) is None


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
    assert (
        "no such column (at /work/train.py:12); the same exception at the same line ended an earlier"
        " attempt of this run" in failed
    )


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
