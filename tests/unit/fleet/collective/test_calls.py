"""What trainers that differ read of each other; two numbers over connections would tell them that they do."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest

from fleet.collective.calls import Calls
from fleet.collective.rendezvous import Place
from fleet.errors import ConfigurationError
from tests.support.counted_store import CountedStore


def of_all(
    size: int, call: Callable[[int, Calls], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[Any]]:
    """Have simulated trainers that differ make a call; return the bytes that it took, and what each found."""
    monkeypatch.setattr(Calls, "_is_everybodys", lambda *_: False)
    store = CountedStore()

    def of_one(rank: int) -> Any:
        place = Place(rank, size, "127.0.0.1", 1)
        return call(rank, Calls(place, cast("Any", store), timedelta(seconds=60)))

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(of_one, range(size)))
    return store.bytes, found


@pytest.mark.parametrize("size", [128, 256])
def test_what_trainers_that_differ_read_grows_with_their_number(size, monkeypatch):
    texts = [f"{'a weight ' * 10}{rank}" for rank in range(size)]
    num_bytes, found = of_all(size, lambda rank, calls: calls.texts("weights", texts[rank]), monkeypatch)
    assert num_bytes <= 600 * size
    assert found == [{0: texts[0], 1: texts[1], rank: texts[rank]} for rank in range(size)]


def test_whoever_differs_from_anybody_finds_one(monkeypatch):
    _, found = of_all(4, lambda rank, calls: calls.texts("size", "ab"[rank == 2]), monkeypatch)
    assert found == [{0: "a", 2: "b"}, {0: "a", 1: "a", 2: "b"}, {0: "a", 2: "b"}, {0: "a", 2: "b", 3: "a"}]


def test_each_trainer_is_told_of_another_call_than_its_own(monkeypatch):
    def meet(rank: int, calls: Calls) -> str:
        with pytest.raises(ConfigurationError) as raised:
            calls.meet("a barrier" if rank == 2 else "the end")
        return str(raised.value)

    _, (first, second, third) = of_all(3, meet, monkeypatch)
    assert first.startswith("trainer 2 has come to a barrier where this trainer, 0, has come to the end")
    assert second.startswith("trainer 2 has come to a barrier where this trainer, 1, has come to the end")
    assert third.startswith(
        "trainer 0 (127.0.0.1:1) has come to the end where this trainer, 2, has come to a"
    )
