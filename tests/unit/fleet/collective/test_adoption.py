"""Where trainers meet beside a process group of the script's own."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fleet.collective.adoption import place_beside
from fleet.collective.rendezvous import Place
from fleet.errors import ConfigurationError

PLACE = Place(0, 1, "127.0.0.1", 1)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_scripts_store_keeps_its_port_unless_it_is_the_launchers():
    assert place_beside(PLACE).port != PLACE.port
    launched = replace(PLACE, launcher_has_store=True)
    assert place_beside(launched) is launched


@pytest.mark.parametrize("host", ["::1", "trainer-0.invalid"], ids=["ipv6", "not-yet-known"])
def test_a_port_is_found_wherever_the_store_could_listen(host):
    assert place_beside(replace(PLACE, host=host)).port > 1


def test_a_group_of_other_processes_is_named():
    with pytest.raises(ConfigurationError, match=r"rank 0 of 1, and to fleet.init it is trainer 1 of 2"):
        place_beside(replace(PLACE, rank=1, size=2))
