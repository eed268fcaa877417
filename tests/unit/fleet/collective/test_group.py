"""Calls that all trainers make, and waits of a group; errors and captures of a GPU are simulated."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fleet.collective import group as group_module
from fleet.collective.devices import Marks
from fleet.collective.group import Group, TextExchange
from fleet.collective.heartbeats import WaitKind
from fleet.collective.watchdog import Watchdog
from fleet.collective.world import World
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, FleetError
from tests.support.counted_store import CountedStore

CPU = torch.device("cpu")
_log_warning = group_module._log.warning
SAME_GPU = (
    "NCCL error in: ProcessGroupNCCL.cpp:93, invalid usage (run with NCCL_DEBUG=WARN)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
)


class Watched(Watchdog):
    """Finds every other trainer alive, and notes which waits a GPU continues."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None), World(0, 1, "localhost", 1), Deadlines(), lambda _: None)
        self.until: list[Callable[[], bool] | None] = []

    def waiting(
        self, what: str, kind: WaitKind = WaitKind.OTHER, until: Callable[[], bool] | None = None
    ) -> Any:
        self.until.append(until)
        return super().waiting(what, kind, until)

    def silent_now(self) -> list[int]:
        return []


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def group(watched: Watched) -> Group:
    return group_of_one(watched, HashStore())


def group_of_one(watched: Watched, store: Any) -> Group:
    world = World(0, 1, "localhost", 1)
    return Group(world, Deadlines(), TextExchange(world, store, 60), watched, {})


@pytest.mark.parametrize("capturing", [False, True])
def test_a_wait_continues_on_the_gpu_unless_a_graph_is_captured(group, watched, monkeypatch, capturing):
    group._marks[CPU] = Marks(CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with group.waiting("the average", device=CPU):
        pass
    (until,) = watched.until
    assert until is None if capturing else until()


def test_connecting_a_device_is_a_named_wait(group, watched, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError(SAME_GPU)

    monkeypatch.setattr(dist, "all_reduce", refuse)
    with pytest.raises(FleetError, match="failed in connecting the trainers' GPUs by NCCL: Duplicate GPU"):
        group._connect(CPU)
    assert len(watched.until) == 1
    assert CPU not in group._marks


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param("torch.float32 on cuda", id="on-another-device"),
        pytest.param("torch.float64 on cpu", id="of-another-dtype-at-which-gloo-would-end-the-process"),
    ],
)
def test_models_of_different_dtypes_or_devices_are_named(group, monkeypatch, theirs):
    monkeypatch.setattr(group, "agree", lambda _, ours: {0: ours, 1: theirs})
    said = rf"trainer 1 has its parameters as {theirs} where .* as torch.float32 on cpu"
    with pytest.raises(ConfigurationError, match=said):
        group.use([torch.zeros(1), torch.zeros(2)])


class Untouched:
    """A store of which nobody asks anything."""


def test_equal_values_are_compared_without_the_store(watched):
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = group_of_one(watched, Untouched())
    assert group.agree("parameters", "many") == {0: "many"}
    dist.destroy_process_group()


def test_a_connection_that_hangs_logs_the_interface(monkeypatch, caplog):
    said = threading.Event()
    monkeypatch.setattr(group_module, "LOG_AFTER_SECONDS", 0.01)

    def noted(*of: Any) -> None:
        _log_warning(*of)
        said.set()

    monkeypatch.setattr(group_module._log, "warning", noted)
    with group_module._logging_the_interface({"GLOO_SOCKET_IFNAME": "docker0"}):
        assert said.wait(60)
    assert "the others must reach this trainer through the interface 'docker0'" in caplog.text
    assert "set GLOO_SOCKET_IFNAME to another" in caplog.text


def of_all(
    size: int, call: Callable[[int, Group], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[Any]]:
    """Make simulated trainers that differ make a call; return the bytes that it took, and what each found."""
    monkeypatch.setattr(Group, "_is_equal", lambda *_: False)
    store = CountedStore()

    def of_one(rank: int) -> Any:
        world = World(rank, size, "127.0.0.1", 1)
        texts = TextExchange(world, cast("Any", store), 60)
        return call(rank, Group(world, Deadlines(), texts, Watched(), {}))

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(of_one, range(size)))
    return store.bytes, found


@pytest.mark.parametrize("size", [128, 256])
def test_the_bytes_of_a_difference_grow_with_the_number_of_trainers(size, monkeypatch):
    texts = [f"{'a weight ' * 10}{rank}" for rank in range(size)]
    monkeypatch.setattr(Group, "_compare_calls", lambda *_: None)
    num_bytes, found = of_all(size, lambda rank, group: group.agree("weights", texts[rank]), monkeypatch)
    assert num_bytes <= 600 * size
    assert found == [{0: texts[0], 1: texts[1], rank: texts[rank]} for rank in range(size)]


def test_a_trainer_that_differs_from_any_finds_one(monkeypatch):
    _, found = of_all(4, lambda rank, group: group.agree("size", "ab"[rank == 2]), monkeypatch)
    assert found == [{0: "a", 2: "b"}, {0: "a", 1: "a", 2: "b"}, {0: "a", 2: "b"}, {0: "a", 2: "b", 3: "a"}]


def test_each_trainer_learns_of_a_different_call(monkeypatch):
    def meet(rank: int, group: Group) -> str:
        with pytest.raises(ConfigurationError) as raised:
            group.barrier("a barrier" if rank == 2 else "the end")
        return str(raised.value)

    _, (first, second, third) = of_all(3, meet, monkeypatch)
    assert first.startswith("trainer 2 has reached a barrier where this trainer, 0, has reached the end")
    assert second.startswith("trainer 2 has reached a barrier where this trainer, 1, has reached the end")
    assert third.startswith(
        "trainer 0 (127.0.0.1:1) has reached the end where this trainer, 2, has reached a"
    )
