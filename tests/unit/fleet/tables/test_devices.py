"""Rows on their way to a model's device and back."""

import pytest
import torch

from fleet.tables.devices import to_device, to_host

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")


def test_on_the_host_they_stay_where_they_are():
    rows = torch.randn(3, 2)
    assert to_device(rows, torch.device("cpu")) is rows
    assert to_host(rows) is rows
    assert to_device(rows, torch.device("meta")).is_meta


@pytest.mark.gpu
@on_gpu
def test_to_a_gpu_they_go_by_pinned_memory_and_come_back_in_such(monkeypatch):
    pinned, pin = [], torch.Tensor.pin_memory

    def noted(rows: torch.Tensor) -> torch.Tensor:
        pinned.append(pin(rows))
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", noted)
    rows = torch.randn(50_000, 16)
    there = to_device(rows, torch.device("cuda"))
    assert there.is_cuda
    assert pinned[0].is_pinned()
    back = to_host(there * 2)
    assert back.is_pinned()
    assert torch.equal(back, rows * 2)


@pytest.mark.gpu
@on_gpu
def test_memory_that_is_taken_again_at_once_does_not_change_what_was_sent():
    batches = [torch.full((100_000, 8), float(number)) for number in range(50)]
    there = [to_device(batch, torch.device("cuda")) for batch in batches]
    assert [float(rows.min()) == float(rows.max()) == at for at, rows in enumerate(there)] == [True] * 50
