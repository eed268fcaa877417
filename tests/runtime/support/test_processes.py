"""Programs of tests end by the signals that are sent to them, however the tests were started."""

import os
import signal
import subprocess

import pytest

from tests.support.processes import let_programs_heed_signals


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_programs_end_by_a_signal_that_the_tests_were_started_to_ignore(number: signal.Signals):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        let_programs_heed_signals()
        os.kill(os.getpid(), number)  # the tests themselves go on
        ended = subprocess.run(["sh", "-c", f"kill -{int(number)} $$; exit 3"], check=False)
    finally:
        signal.signal(number, before)
    assert ended.returncode == -number
