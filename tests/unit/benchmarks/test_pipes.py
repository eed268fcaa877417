"""A benchmark's processes are waited for, but not for ever."""

import os

import pytest

from benchmarks.pipes import hear


def test_who_says_nothing_is_named_and_who_speaks_or_ends_is_heard():
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        with os.fdopen(writing, "w") as other:
            with pytest.raises(SystemExit, match=r"trainer 1 said nothing for 0\.05 s"):
                hear(pipe, "trainer 1", 0.05)
            print("done 0.5", file=other, flush=True)
            assert hear(pipe, "trainer 1", 5) == "done 0.5"
        assert hear(pipe, "trainer 1", 5) == ""
