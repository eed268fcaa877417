"""A benchmark's processes are waited for, but not for ever."""

import os

import pytest

from benchmarks.pipes import hear, hear_all


def test_who_says_nothing_is_named_and_who_speaks_or_ends_is_heard():
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        with os.fdopen(writing, "w") as other:
            with pytest.raises(SystemExit, match=r"trainer 1 said nothing for 0\.05 s"):
                hear(pipe, "trainer 1", 0.05)
            print("done 0.5", file=other, flush=True)
            assert hear(pipe, "trainer 1", 5) == "done 0.5"
        assert hear(pipe, "trainer 1", 5) == ""


def test_whoever_ends_is_heard_at_once_though_another_is_awaited():
    pipes = [os.pipe() for _ in range(3)]
    with (
        os.fdopen(pipes[0][0]) as first,
        os.fdopen(pipes[1][0]) as second,
        os.fdopen(pipes[2][0]) as server,
        os.fdopen(pipes[1][1], "w") as says,
        os.fdopen(pipes[0][1], "w") as silent,
    ):
        all_pipes = {"trainer 0": first, "trainer 1": second, "server 0": server}
        print("done", file=says, flush=True)
        os.close(pipes[2][1])
        assert hear_all(all_pipes, ["trainer 0", "trainer 1"], 5) == {"server 0": ""}
        print("done", file=says, flush=True)
        print("done 1", file=silent, flush=True)
        del all_pipes["server 0"]
        assert hear_all(all_pipes, ["trainer 0", "trainer 1"], 5) == {
            "trainer 0": "done 1",
            "trainer 1": "done",
        }
