"""The memory, the cores and the time of a process."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet.process.resources import COPY_PAST_CACHES, WatchClock, available_cores, keep_freed_memory

LOADER = Path("/lib64/ld-linux-x86-64.so.2")

# Numpy asks the same malloc for memory as torch does, and starts sooner.
STEPS = """
import resource, sys
import numpy
from fleet.process.resources import keep_freed_memory

def step():
    gradients = [numpy.ones(1 << 21) for _ in range(4)]

if sys.argv[1] == "keep":
    assert keep_freed_memory({})
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(what: str) -> int:
    command = [sys.executable, "-c", STEPS, what]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.programs
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_memory_that_a_step_frees_serves_the_next_step():
    assert page_faults("keep") < 0.05 * page_faults("leave")


def test_where_glibc_refuses_the_large_threshold_the_one_that_it_accepts_is_set(monkeypatch):
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, option: int, value: int) -> int:
            calls.append((option, value))
            return int(value <= 32 << 20)

    monkeypatch.setattr("ctypes.CDLL", lambda _: Library())
    assert keep_freed_memory({})
    assert calls == [(-3, 1 << 30), (-3, 32 << 20), (-1, -1)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1"),
        ("MALLOC_MMAP_THRESHOLD_", "1"),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F:glibc.malloc.trim_threshold=1"),
    ],
)
def test_a_user_who_has_tuned_malloc_is_left_alone(name, value):
    assert not keep_freed_memory({name: value})


def test_how_memory_is_copied_says_nothing_about_malloc(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1))
    assert keep_freed_memory(COPY_PAST_CACHES)


@pytest.mark.programs
@pytest.mark.skipif(not LOADER.exists(), reason="only glibc on x86-64 copies past the caches from a set size")
def test_glibc_takes_the_size_from_which_copies_pass_by_the_caches():
    told = subprocess.run(
        [LOADER, "--list-tunables"], env=COPY_PAST_CACHES, capture_output=True, text=True, check=True
    )
    assert "glibc.cpu.x86_non_temporal_threshold: 0x200000 " in told.stdout


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param("max 100000\n", 8, id="no-limit"),
        pytest.param("200000 100000\n", 2, id="a-limit"),
        pytest.param("250000 100000\n", 3, id="a-part-of-a-core-is-a-core"),
        pytest.param("10000 100000\n", 1, id="at-least-one"),
        pytest.param("6400000 100000\n", 8, id="a-limit-above-what-there-is"),
        pytest.param("", 8, id="an-empty-file"),
        pytest.param(None, 8, id="no-control-group"),
    ],
)
def test_available_cores(told: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    file = tmp_path / "cpu.max"
    if told is not None:
        file.write_text(told)
    assert available_cores(file) == expected


def test_time_in_which_the_watcher_was_frozen_does_not_count():
    moments = iter([100.0, 101.0, 106.0, 1006.0, 1007.0])
    clock = WatchClock(5.0, lambda: next(moments))
    assert [clock.now() for _ in range(4)] == [101.0, 106.0, 111.0, 112.0]


def test_on_a_machine_where_every_look_is_late_time_goes_on():
    moments = iter(range(0, 10_000, 50))
    clock = WatchClock(5.0, lambda: float(next(moments)))
    assert [clock.now() for _ in range(4)] == [5.0, 10.0, 15.0, 20.0]
