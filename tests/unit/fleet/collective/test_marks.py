"""How far a stream is, as any thread sees it; the CPU stands in for a GPU, and reaches a mark at once."""

import pytest
import torch

from fleet.collective.marks import Marks


def test_a_mark_is_reached_when_the_stream_comes_to_it_and_not_before():
    marks = Marks(torch.device("cpu"))
    for _ in range(200):
        mark = marks.next()
        assert not mark.reached()
        mark.put()
        assert mark.reached()


def test_whether_a_mark_is_reached_is_no_question_to_cuda(monkeypatch):
    mark = Marks(torch.device("cpu")).next()
    for name in ("_lazy_init", "Event", "current_stream", "synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a call of CUDA"))
    assert not mark.reached()
