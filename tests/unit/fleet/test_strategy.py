import dataclasses
from typing import Any

import pytest

from fleet import DistributedStrategy
from fleet.errors import ConfigurationError


def test_defaults():
    strategy = DistributedStrategy()
    assert dataclasses.asdict(strategy) | {"transpiler": None} == {
        "sync_mode": None,
        "overlap": True,
        "cross_step": False,
        "server_kernels": "default",
        "grad_clip": None,
        "transpiler": None,
    }
    assert strategy.transpiler.slice_var_up is True


def test_a_strategy_does_not_change():
    strategy: Any = DistributedStrategy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.overlap = False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync_mode": False}, r"strategy\.sync_mode = False: asynchronous training is not supported yet"),
        ({"sync_mode": "Sync"}, r"strategy\.sync_mode is 'Sync'; expected True or False"),
        ({"overlap": 1}, r"strategy\.overlap is 1; expected True or False"),
        ({"cross_step": True}, r"strategy\.cross_step = True: .* not supported yet; use False"),
        ({"server_kernels": "fused"}, r"strategy\.server_kernels is 'fused'; expected default"),
        ({"grad_clip": 5.0}, r"strategy\.grad_clip = 5\.0: .* not supported yet; use None"),
        ({"transpiler": {}}, r"strategy\.transpiler is \{\}; expected a DistributeTranspilerConfig"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        DistributedStrategy(**fields)


def test_an_unknown_field_is_an_error():
    make: Any = DistributedStrategy
    with pytest.raises(TypeError, match="overlapp"):
        make(overlapp=True)


def test_the_job_decides_what_the_strategy_leaves_open():
    assert DistributedStrategy(overlap=False).resolved("Sync") == DistributedStrategy(
        overlap=False, sync_mode=True
    )


@pytest.mark.parametrize("mode", ["Async", "HalfAsync", "Geo"])
def test_modes_that_do_not_run_yet_are_named(mode):
    with pytest.raises(
        ConfigurationError, match=f"FLEET_SYNC_MODE is '{mode}', which does not run yet; use Sync"
    ):
        DistributedStrategy().resolved(mode)
    assert DistributedStrategy(sync_mode=True).resolved(mode).sync_mode is True


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ConfigurationError, match="'sync'; expected one of Sync, Async, HalfAsync, Geo"):
        DistributedStrategy().resolved("sync")
