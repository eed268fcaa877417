"""Ends of logs as torchrun writes them, and what a person is told of each."""

from __future__ import annotations

import pytest

from fleet_operator.plan.torchrun import find_root_cause
from fleet_operator.plan.words import last_sentence

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
BY_RANK = """\
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
            BY_RANK + OWN + HEAD + UNKNOWN,
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
            BY_RANK + OWN + HEAD + ABORTED,
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
            "rank 0: exit code 1; its exception stands in the log above torchrun's summary, and here too if "
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
