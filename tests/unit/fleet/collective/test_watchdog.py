"""Which trainers a watchdog finds silent, lost or in a deadlock."""

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistStoreError

from fleet.collective import watchdog as watchdog_module
from fleet.collective.heartbeats import Absence, Cohort, Report, TrainerState, WaitKind
from fleet.collective.watchdog import Heartbeats, Watchdog
from fleet.collective.world import World
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError, FleetError, PeerLostError
from tests.support.beating_trainers import WAITING, BeatingTrainers
from tests.support.counted_store import CountedStore
from tests.support.processes import wait_for

ASSERTION = torch.AcceleratorError("CUDA error: device-side assert triggered\nSearch for it in the manual.")
SAME_GPU = (
    "NCCL error in: ProcessGroupNCCL.cpp:93, invalid usage (run with NCCL_DEBUG=WARN)\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
)
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
ABORTED = "NCCL communicator was aborted on rank 0."


class OtherTrainer:
    """Stands in for the store, with the heartbeats of the other one of two trainers in it."""

    def __init__(self, standing: TrainerState, *, alive: bool) -> None:
        self.written = ""
        self.looked = threading.Semaphore(0)
        self._standing = standing
        self._alive = alive
        self._beat = 0
        self._values: dict[str, str] = {}

    def set_timeout(self, timeout: Any) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: Any) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        if key.startswith("beat/"):
            self.written = value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._beat += self._alive
        self.looked.release()
        return [f"{self._beat} {self._standing.to_text()}".encode() for _ in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values[key].encode()

    def add(self, key: str, number: int) -> int:
        return number

    @property
    def seen(self) -> TrainerState:
        """What the other trainer reads of this one."""
        return TrainerState.from_text(self.written.partition(" ")[2])


@contextmanager
def watching(
    store: OtherTrainer,
    lost: Callable[[FleetError], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Watchdog]:
    deadlines = Deadlines(heartbeat_seconds=0.01, deadline_seconds=0.2)
    watch = Watchdog(cast("Any", store), World(0, 2, "localhost", 1), deadlines, lost, clock)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def error_of(store: OtherTrainer) -> FleetError:
    """Return what is found while a GPU waits for gradients, and nothing else does."""
    ended, errors = threading.Event(), []

    def lost(error: FleetError) -> None:
        errors.append(error)
        ended.set()

    with watching(store, lost) as watch:
        with watch.waiting("the average of step 0's gradients", WaitKind.EXCHANGE, until=lambda: False):
            pass
        assert ended.wait(60)
    return errors[0]


def test_a_lost_trainer_is_found_while_only_the_gpu_waits():
    store = OtherTrainer(TrainerState(), alive=False)
    error = error_of(store)
    assert isinstance(error, PeerLostError)
    assert "trainer 1 sent no heartbeat" in str(error)
    assert "while the average of step 0's gradients waited" in str(error)
    assert store.seen == TrainerState(
        exchanges=1, kind=WaitKind.EXCHANGE, what="the average of step 0's gradients"
    )


def test_the_outer_wait_continues_when_one_within_it_has_ended():
    store, whole = OtherTrainer(TrainerState(), alive=True), "the average of step 0's gradients"
    with watching(store, lambda _: None) as watch:
        with watch.waiting(whole, WaitKind.EXCHANGE):
            with watch.waiting("an average by PowerSGD"):
                wait_for(lambda: store.seen.what == "an average by PowerSGD", "the inner wait")
            wait_for(lambda: store.seen == TrainerState(0, 1, WaitKind.EXCHANGE, whole), "the outer wait")
        wait_for(lambda: store.seen == TrainerState(exchanges=1), "the end of both")


def test_a_deadlock_is_found_while_only_the_gpu_waits():
    error = error_of(OtherTrainer(TrainerState(1, 0, WaitKind.CALL, "stop_worker()"), alive=True))
    assert isinstance(error, ConfigurationError)
    assert "trainer 1 waits for stop_worker() after 0 exchanges of gradients" in str(error)


def test_a_wait_is_over_when_the_gpu_has_ended_it():
    asked = threading.Event()
    errors: list[FleetError] = []

    def done() -> bool:
        asked.set()
        return True

    store = OtherTrainer(TrainerState(), alive=False)
    with watching(store, errors.append) as watch:
        with watch.waiting("the average of step 0's gradients", WaitKind.EXCHANGE, until=done):
            pass
        assert asked.wait(60)
    assert store.seen == TrainerState(exchanges=1)
    assert not errors


def test_time_in_which_a_trainer_was_frozen_is_no_silence_of_others():
    moments, errors = [0.0], list[FleetError]()
    store = OtherTrainer(TrainerState(), alive=False)

    def lost(error: FleetError) -> None:
        errors.append(error)
        store.looked.release()

    with watching(store, lost, lambda: moments[0]) as watch, watch.waiting("step 0"):
        assert store.looked.acquire(timeout=60)
        assert store.looked.acquire(timeout=60)  # the first look has been judged by now
        moments[0] += 1000.0
        for _ in range(3):
            assert store.looked.acquire(timeout=60)
        assert not errors
        while not errors:  # who stays silent while it runs is missed as ever
            moments[0] += 0.05
            assert store.looked.acquire(timeout=60)
    assert isinstance(errors[0], PeerLostError)


@pytest.mark.parametrize("size", [512, 1024])
def test_the_keys_that_waiting_trainers_read_grow_with_their_number(size):
    store: Any = CountedStore()
    deadlines, errors = Deadlines(heartbeat_seconds=1.0), list[FleetError]()
    watches = [
        Watchdog(store, World(rank, size, "localhost", 1), deadlines, errors.append) for rank in range(size)
    ]
    with ExitStack() as all_wait:
        for watch in watches:
            watch.start()
            all_wait.callback(watch.close)
            all_wait.enter_context(watch.waiting("the average of step 3456's gradients", WaitKind.EXCHANGE))
        began = store.keys, store.bytes, store.sets
        while store.sets - began[2] < 3 * size:
            time.sleep(0.1)
        keys, num_bytes, beats = store.keys - began[0], store.bytes - began[1], store.sets - began[2]
    assert keys <= 6 * beats
    assert num_bytes <= 800 * beats
    assert not errors


@contextmanager
def watches(size: int, alive: int) -> Iterator[tuple[list[Watchdog], list[list[FleetError]]]]:
    """Have the first of some trainers live, and the others have beaten once."""
    store: Any = CountedStore()
    deadlines = Deadlines(heartbeat_seconds=0.05, deadline_seconds=1.0)
    errors: list[list[FleetError]] = [[] for _ in range(size)]
    all_ = [
        Watchdog(store, World(rank, size, "localhost", 1), deadlines, errors[rank].append)
        for rank in range(size)
    ]
    with ExitStack() as closing:
        for watch in all_:
            watch.start()
            closing.callback(watch.close)
        for watch in all_[alive:]:
            watch.close()
        yield all_, errors


def test_readers_of_a_report_find_a_lost_trainer_as_soon_as_the_observer():
    with watches(4, alive=3) as (all_, errors), ExitStack() as waiting:
        for watch in all_[:3]:
            waiting.enter_context(watch.waiting("a barrier", WaitKind.CALL))
        began = time.monotonic()
        wait_for(lambda: all(errors[:3]), "an error of each")
        assert time.monotonic() - began >= 1.0
    for (error,) in errors[:3]:
        assert isinstance(error, PeerLostError)
        assert str(error).startswith("trainer 3 sent no heartbeat for 1 s while a barrier waited")


def test_readers_of_a_report_find_a_deadlock():
    with watches(4, alive=4) as (all_, errors), ExitStack() as waiting:
        waiting.enter_context(all_[1].waiting("the average of step 0's gradients", WaitKind.EXCHANGE))
        waiting.enter_context(all_[2].waiting("stop_worker()", WaitKind.CALL))
        wait_for(lambda: errors[1] and errors[2], "both errors")
        assert str(errors[1][0]).startswith("trainer 2 waits for stop_worker() after 0 exchanges")
        assert str(errors[2][0]).startswith("trainer 1 waits for the average of step 0's gradients after 0")
        assert not errors[0]
        assert not errors[3]


def test_waiting_trainers_log_the_first_missing_ones_by_name(monkeypatch, caplog):
    monkeypatch.setattr(watchdog_module, "LOG_AFTER_SECONDS", 0.4)
    with watches(24, alive=13) as (all_, _), ExitStack() as waiting:
        for watch in all_[:2]:
            waiting.enter_context(watch.waiting("a barrier", WaitKind.CALL))
        silent = "no heartbeat from trainer 13, trainer 14, .*, trainer 20 and 3 more"
        busy = "not there yet: trainer 2, trainer 3, .*, trainer 9 and 3 more"
        said = re.compile(f"a barrier has been waiting for [0-9]+ s; {silent}, {busy}")
        wait_for(lambda: len(said.findall(caplog.text)) >= 2, "a word of each")


def test_a_new_wait_is_published_before_its_deadlock_is_reported():
    class Late(OtherTrainer):
        def multi_get(self, keys: Sequence[str]) -> list[bytes]:
            if not self.seen.what:
                waits.enter_context(watch.waiting("the average of step 0's gradients", WaitKind.EXCHANGE))
            return super().multi_get(keys)

    store = Late(TrainerState(1, 0, WaitKind.CALL, "stop_worker()"), alive=True)
    ended = threading.Event()
    with ExitStack() as waits:
        with watching(store, lambda _: ended.set()) as watch:
            waits.enter_context(watch.waiting("", WaitKind.OTHER))
            assert ended.wait(60)
        assert store.seen.kind is WaitKind.EXCHANGE
        assert (
            "the average of step 0's gradients" in store.compare_set("what heartbeats say", "-", "").decode()
        )


def test_a_trainer_that_ends_in_a_deadlock_is_not_lost_to_one_that_confirms_it():
    class Confirming(OtherTrainer):
        def wait(self, keys: Sequence[str], timeout: Any) -> None:
            confirming.set()
            assert has_ended.wait(60)

    confirming, has_ended, errors = threading.Event(), threading.Event(), list[FleetError]()
    store = Confirming(TrainerState(1, 0, WaitKind.CALL, "stop_worker()"), alive=True)

    def exchange() -> None:
        with watch.waiting("the average of step 0's gradients", WaitKind.EXCHANGE):
            assert confirming.wait(60)
            has_ended.set()
            raise RuntimeError(CLOSED)

    with watching(store, errors.append) as watch:
        with pytest.raises(ConfigurationError, match=r"trainer 1 waits for stop_worker\(\)") as caught:
            exchange()
        assert errors == [caught.value]


def check(found: Report) -> None:
    """Have trainer 0, which waits, judge by what another has found."""
    store = OtherTrainer(TrainerState(), alive=False)
    watch = Watchdog(cast("Any", store), World(0, 2, "localhost", 1), Deadlines(), lambda _: None)
    with watch.waiting("a barrier", WaitKind.CALL):
        watch._check(found)


def test_a_trainer_with_a_newer_heartbeat_is_not_lost():
    check(Report(1, absences=[Absence(1, -1, 500.0)]))
    with pytest.raises(PeerLostError, match="trainer 1 sent no heartbeat for 500 s"):
        check(Report(1, absences=[Absence(1, 0, 500.0)]))


def test_a_trainer_does_not_miss_itself_and_logs_nothing_before_the_first_observation(monkeypatch, caplog):
    monkeypatch.setattr(watchdog_module, "LOG_AFTER_SECONDS", -1.0)
    check(Report(1, absences=[Absence(0, 0, 500.0)], cohorts=[Cohort(TrainerState(), 2, [0, 1])]))
    check(Report(1))
    assert [record.getMessage() for record in caplog.records] == [
        "a barrier has been waiting for 0 s; every trainer is alive, not there yet: trainer 1"
    ]


def missed_by(found: dict[int, Report]) -> dict[int, dict[int, float]]:
    """Return whom each misses, and for how many seconds."""
    return {rank: {each.rank: each.seconds for each in report.absences} for rank, report in found.items()}


def test_one_trainer_observes_and_the_others_read_its_report():
    trainers = BeatingTrainers(4)
    found = trainers.beat(range(4), times=5)
    assert len(trainers.store.reads) == 5
    assert {report.observer for report in found.values()} == {0}
    assert all(report.number == 5 for report in found.values())


@pytest.mark.parametrize(
    "waiting", [[0], [3], [1, 2, 3]], ids=["only-trainer-0", "only-the-last", "all-but-0"]
)
def test_any_waiting_trainer_learns_the_states_of_all(waiting):
    trainers = BeatingTrainers(4)
    computing = set(range(4)) - set(waiting)
    found = trainers.beat(waiting, computing, times=4)
    for report in found.values():
        assert {each.state.what: each.alive for each in report.cohorts} == {
            WAITING.what: len(waiting),
            "": len(computing),
        }


def test_a_single_trainer_reports_itself():
    assert BeatingTrainers(1).beat([0], times=3)[0].cohorts[0].ranks == [0]


def test_another_trainer_takes_over_when_the_observer_retires():
    trainers = BeatingTrainers(4)
    trainers.beat(range(3), times=8)
    found = trainers.beat([1, 2], computing=[0])
    assert {report.observer for report in found.values()} == {1}
    assert missed_by(found) == {1: {3: 7.0}, 2: {3: 7.0}}
    trainers.beat([], computing=[0, 1, 2], times=3)
    assert not any(missed_by(trainers.beat(range(4), times=2)).values()), "it came back"


@pytest.mark.parametrize("killed", range(4))
def test_an_absence_counts_from_the_last_heartbeat(killed):
    trainers = BeatingTrainers(4)
    trainers.beat(range(4), times=3)
    found = trainers.beat(set(range(4)) - {killed}, times=10)
    for of_one in missed_by(found).values():
        ((rank, seconds),) = of_one.items()
        assert rank == killed
        assert seconds >= 9.0


def test_a_trainer_that_dies_with_the_observer_is_missed():
    trainers = BeatingTrainers(4)
    trainers.beat(range(4), times=3)
    for of_one in missed_by(trainers.beat([2, 3], times=10)).values():
        assert of_one.keys() == {0, 1}
        assert min(of_one.values()) >= 6.0


def test_an_observer_that_was_frozen_reads_its_successors_report():
    trainers = BeatingTrainers(3)
    trainers.beat(range(3), times=3)
    trainers.beat([1, 2], times=10)
    found = trainers.beat(range(3))
    assert {report.observer for report in found.values()} == {1}
    found = trainers.beat(range(3))
    assert missed_by(found) == {0: {}, 1: {}, 2: {}}


def test_absences_grow_after_the_last_report():
    trainers = BeatingTrainers(3)
    trainers.beat([0, 1], times=8)
    assert missed_by(trainers.beat([1])) == {1: {2: 8.0}}


def test_still_absent_reads_the_heartbeats_again():
    trainers = BeatingTrainers(3)
    trainers.beat(range(3))
    missed = [Absence(1, 1, 200.0), Absence(2, 1, 200.0)]
    assert trainers.heartbeats[0].still_absent(missed) == missed
    trainers.beat([2])
    assert trainers.heartbeats[0].still_absent(missed) == missed[:1]


def torchs_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("store", [CountedStore, HashStore, torchs_store])
def test_torchs_stores_behave_like_the_simulated_one(store):
    trainers = BeatingTrainers(3, store())
    trainers.beat(range(3), times=3)
    assert missed_by(trainers.beat([1, 2], times=4)) == {1: {0: 4.0}, 2: {0: 4.0}}
    for _ in range(2):
        assert trainers.heartbeats[1].find_silent(lambda _: trainers.beat([], [1])) == [0, 2]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(Heartbeats.confirm_deadlock, trainers.heartbeats)) == [None] * 3


def silent(trainers: BeatingTrainers, rank: int, pause: Callable[[float], object]) -> list[int]:
    """Return which trainers one of them finds silent."""
    return trainers.heartbeats[rank].find_silent(pause)


def ask_while_another_looks(
    trainers: BeatingTrainers, alive: Collection[int], then: Collection[int]
) -> list[Any]:
    """Have trainer 2 ask who is silent while trainer 1 looks for that; return what both are told.

    Those in `alive` beat while trainer 1 looks, and those in `then` while trainer 2 does, if it does.
    """
    asked, answered = threading.Event(), threading.Event()

    def pause_of_second(_: float) -> None:
        if not asked.is_set():
            asked.set()
            assert answered.wait(60)
        else:
            trainers.beat([], then)

    with ThreadPoolExecutor(1) as threads:
        second = None

        def pause_of_first(_: float) -> None:
            nonlocal second
            second = threads.submit(silent, trainers, 2, pause_of_second)
            assert asked.wait(60)
            trainers.beat([], alive)

        told = silent(trainers, 1, pause_of_first)
        answered.set()
        assert second is not None
        return [told, second.result()]


def test_one_trainer_searches_for_all_that_ask():
    trainers = BeatingTrainers(4)
    assert ask_while_another_looks(trainers, alive=[0, 1, 2], then=[]) == [[3], [3]]
    assert len(trainers.store.reads) == 2


@pytest.mark.parametrize(
    ("alive", "first"),
    [
        pytest.param(range(4), [], id="nobody-was-silent-before-it-asked"),
        pytest.param([0, 1, 3], [2], id="it-was-frozen-itself"),
    ],
)
def test_a_search_that_began_too_early_is_repeated(alive, first):
    assert ask_while_another_looks(BeatingTrainers(4), alive, then=[0, 1, 2]) == [first, [3]]


def test_a_later_question_starts_another_search():
    trainers = BeatingTrainers(3)
    assert silent(trainers, 1, lambda _: trainers.beat([], [0, 1])) == [2]
    assert silent(trainers, 0, lambda _: trainers.beat([], [0, 1, 2])) == []


def test_a_trainer_searches_itself_if_the_searcher_dies():
    trainers = BeatingTrainers(4)
    with pytest.raises(InterruptedError):
        silent(trainers, 1, killed)
    assert silent(trainers, 2, lambda _: trainers.beat([], [0, 2])) == [1, 3]


def killed(_: float) -> None:
    raise InterruptedError


class Stopped:
    """Takes what it is told, and does not answer."""

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    def compare_set(self, *_: str) -> bytes:
        self.asked.set()
        self.ended.wait(20)
        return b""


def test_a_store_that_never_answers_blocks_no_other_thread(monkeypatch):
    monkeypatch.setattr(watchdog_module, "STORE_SECONDS", 0.1)
    store: Any = Stopped()
    watch = Watchdog(store, World(1, 2, "localhost", 1), Deadlines(), lambda _: None)
    first = threading.Thread(target=watch._heartbeats._exchange, args=("key", "", "text"))
    first.start()
    assert store.asked.wait(60)
    with pytest.raises(DistStoreError, match="had no answer for 0 s"):
        watch._heartbeats.beat(TrainerState())
    assert watch.silent_now() == [0]
    store.ended.set()
    first.join()


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """Return a watchdog that finds every other trainer alive."""
    made = Watchdog(cast("Any", None), World(0, 2, "localhost", 1), Deadlines(), lambda _: None)
    monkeypatch.setattr(made, "silent_now", list)
    return made


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ASSERTION, "device-side assert triggered; CUDA_LAUNCH_BLOCKING=1 shows which"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), "Tried 2 GiB.; make the batch or the"),
        (dist.DistBackendError(SAME_GPU), "Duplicate GPU detected : .* 1000; NCCL_DEBUG=INFO shows"),
    ],
)
def test_an_error_of_the_own_device_is_reported_as_such(watchdog, error, words):
    expected = f"this trainer's device failed in the average of step 0's gradients: .*{words}"
    with (
        pytest.raises(FleetError, match=expected) as caught,
        watchdog.waiting("the average of step 0's gradients"),
    ):
        raise error
    assert caught.type is FleetError


def test_an_error_of_the_transport_is_blamed_on_no_trainer_if_all_are_alive(watchdog):
    expected = "though every trainer is alive: NCCL communicator was"
    with pytest.raises(DeadlineExceededError, match=expected), watchdog.waiting("the average"):
        raise dist.DistBackendError(ABORTED)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(RuntimeError(CLOSED), id="gloo"),
        pytest.param(dist.DistStoreError("wait timeout after 300000ms"), id="the-store"),
    ],
)
def test_a_connection_that_fails_in_a_hook_of_the_script_is_explained(watchdog, error):
    def hook(_: torch.Tensor) -> None:
        raise error

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(hook)
    with pytest.raises(DeadlineExceededError, match="though every trainer"), watchdog.waiting("the average"):
        leaf.backward()


def test_any_other_error_of_a_hook_is_raised_unchanged(watchdog):
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient.view(7))
    with pytest.raises(RuntimeError, match=r"^shape '\[7\]' is invalid"), watchdog.waiting("the average"):
        leaf.backward()
