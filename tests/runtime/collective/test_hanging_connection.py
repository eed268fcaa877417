"""Trainers that meet, and then cannot reach each other, as by an interface that leads elsewhere."""

import pytest

from fleet.collective.group import LOG_AFTER_SECONDS
from tests.support.processes import wait_for

SECONDS = 10
SAID = "the others must reach this trainer through the interface 'lo'"
# Each trainer tells the other an address of gloo's at which nobody answers: the queue there is full, so the
# kernel leaves all that would connect without a word. Which of two connects depends on their addresses.
ELSEWHERE = """
import re, socket, struct
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from fleet.collective import group

full = socket.create_server(("127.0.0.1", 0), backlog=0)
others = [socket.socket() for _ in range(4)]
for each in others:
    each.setblocking(False)
    each.connect_ex(full.getsockname())

def address(port):
    return struct.pack("=H", socket.AF_INET) + port + socket.inet_aton("127.0.0.1")

class Elsewhere(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        here = b"..".join(map(re.escape, address(b"to").split(b"to")))
        there = address(struct.pack("!H", full.getsockname()[1]))
        elsewhere, times = re.subn(here, lambda _: there, value, flags=re.DOTALL)
        self.store.set(key, elsewhere)
        if times:
            pathlib.Path("told-" + os.environ["RANK"]).touch()

def passed_on(name):
    return lambda self, *given: getattr(self.store, name)(*given)

for name in ("get", "add", "check", "wait", "append", "multi_get", "multi_set", "has_extended_api"):
    setattr(Elsewhere, name, passed_on(name))

kept = []  # C++ holds no more than its own part of them

def elsewhere(prefix, store):
    kept.append(Elsewhere(PrefixStore(prefix, store)))
    return kept[-1]

group.PrefixStore = elsewhere
fleet.init()
"""


@pytest.mark.serial
def test_a_connection_that_hangs_names_the_interface_within_ten_seconds(trainers, tmp_path):
    assert LOG_AFTER_SECONDS <= SECONDS
    both = trainers(ELSEWHERE)
    told = [tmp_path / f"told-{rank}" for rank in (0, 1)]
    wait_for(lambda: all(each.exists() for each in told), "the addresses of both trainers", seconds=60)
    wait_for(
        lambda: all(SAID in (tmp_path / f"errors-{rank}").read_text() for rank in (0, 1)),
        "a word of both trainers",
        seconds=SECONDS,
    )
    assert all(process.poll() is None for process in both)
