"""Which backend carries the trainers' tensors, and how far a stream is; the CPU stands in for a GPU."""

import random

import pytest
import torch

from fleet.collective.devices import Facts, Marks, backend_of, difference, gpu_number, samples, why_not_nccl
from fleet.errors import ConfigurationError

CPU = Facts("2.9.0")
A, B = Facts("2.9.0", "2.27", "GPU-a", "H200"), Facts("2.9.0", "2.27", "GPU-b", "H200")
NO_OWN = Facts("2.9.0", "2.27")


@pytest.mark.parametrize(
    ("environ", "count", "expected"),
    [
        pytest.param({}, 1, 0, id="the-first-where-nobody-says"),
        pytest.param({"LOCAL_RANK": "1"}, 2, 1, id="one-for-each-process"),
        pytest.param({"LOCAL_RANK": "1"}, 1, None, id="more-processes-than-gpus"),
        pytest.param({"LOCAL_RANK": "0", "FLAGS_selected_gpus": "1"}, 2, 1, id="the-one-that-is-selected"),
    ],
)
def test_the_environment_selects_the_gpu_of_a_process(environ, count, expected):
    assert gpu_number(environ, count) == expected


@pytest.mark.parametrize("environ", [{"FLAGS_selected_gpus": "1"}, {"LOCAL_RANK": "one"}])
def test_a_missing_gpu_is_named(environ):
    with pytest.raises(ConfigurationError, match=r"is '1|one'; expected a number from 0 to 0, for 1 visible"):
        gpu_number(environ, 1)


@pytest.mark.parametrize(
    ("everybodys", "backend", "reason"),
    [
        pytest.param({0: A, 1: B}, "cpu:gloo,cuda:nccl", "", id="a-gpu-each"),
        pytest.param({0: A, 1: NO_OWN}, "gloo", "trainer 1 has no GPU of its own", id="one-gpu-for-two"),
        pytest.param({0: A, 1: A}, "gloo", "the trainers 0 and 1 have the same GPU", id="the-same-gpu"),
        pytest.param({0: CPU, 1: CPU}, "gloo", "trainer 0 has no GPU of its own", id="no-gpus"),
    ],
)
def test_the_backend_depends_on_the_trainers_gpus(everybodys, backend, reason):
    assert backend_of(everybodys) == backend
    assert why_not_nccl(everybodys) == reason


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        pytest.param(B, None, id="alike"),
        pytest.param(
            Facts("2.8.0"), (1, "has PyTorch 2.8.0 where this trainer, 0, has 2.9.0"), id="another-pytorch"
        ),
        pytest.param(
            Facts("2.9.0", "2.26", "GPU-b"),
            (1, "has NCCL 2.26 where this trainer, 0, has 2.27"),
            id="another-nccl",
        ),
        pytest.param(Facts("2.9.0", "2.26"), None, id="another-nccl-that-is-not-used"),
        pytest.param(Facts("2.9.0", "2.27", "GPU-b", "A100"), None, id="another-model-of-gpu"),
    ],
)
def test_versions_that_differ_are_named(theirs, expected):
    assert difference({0: A, 1: theirs}, 0) == expected


def test_facts_travel_as_text():
    assert Facts.from_text(A.to_text()) == A


def test_samples_decide_as_all_facts_do():
    chance = random.Random(7)  # noqa: S311 no secret
    for _ in range(300):
        everybodys = {
            rank: Facts(
                chance.choice(["2.8.0", *["2.9.0"] * 20]),
                chance.choice(["2.26", *["2.27"] * 20]),
                f"GPU-{chance.randrange(rank + 1, 60)}" if chance.random() < 0.95 else "",
                chance.choice(["H100", "H200"]),
            )
            for rank in range(chance.randrange(1, 16))
        }
        few = samples(everybodys)
        for rank, ours in everybodys.items():
            known = few | {rank: ours}
            assert why_not_nccl(known) == why_not_nccl(everybodys)
            assert difference(known, rank) == difference(everybodys, rank)
            assert {each.model for each in known.values()} == {each.model for each in everybodys.values()}


def test_samples_are_few_if_each_trainer_has_its_own_gpu():
    everybodys = {rank: Facts("2.9.0", "2.27", f"GPU-{rank}", "H200") for rank in range(1000)}
    assert samples(everybodys) == {0: everybodys[0]}


def test_a_mark_is_reached_when_the_stream_comes_to_it():
    marks = Marks(torch.device("cpu"))
    for _ in range(200):
        mark = marks.next()
        assert not mark.reached()
        mark.put()
        assert mark.reached()


def test_asking_for_a_mark_does_not_call_cuda(monkeypatch):
    mark = Marks(torch.device("cpu")).next()
    for name in ("_lazy_init", "Event", "current_stream", "synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a call of CUDA"))
    assert not mark.reached()
