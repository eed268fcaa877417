"""What tests of parameter servers have in common."""

from dataclasses import replace

import pytest

from tests.support import parameter_server


@pytest.fixture(params=["tcp", "shared_memory"])
def each_transport(request, monkeypatch) -> None:
    """Let the jobs of a test exchange tensors over TCP, and once more through shared memory."""
    settings = replace(parameter_server.QUICK, transport=request.param)
    monkeypatch.setattr(parameter_server, "QUICK", settings)
