"""The package's public names, all of them and nothing else."""

import subprocess
import sys

import pytest

import fleet

PUBLIC = [
    "Block",
    "CPUPlace",
    "CUDAPlace",
    "CheckpointError",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "ConfigurationError",
    "DeadlineExceededError",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "DistributedMode",
    "DistributedStrategy",
    "Executor",
    "FleetError",
    "HashName",
    "LocalSGD",
    "Operator",
    "PSDispatcher",
    "ParallelExecutor",
    "PeerLostError",
    "PowerSGD",
    "Program",
    "ProtocolError",
    "RoleError",
    "RoundRobin",
    "StateLostError",
    "StrategyFactory",
    "TrainStatus",
    "TranspileError",
    "Variable",
    "create_async_strategy",
    "create_geo_strategy",
    "create_half_async_strategy",
    "create_sync_strategy",
    "default_main_program",
    "default_startup_program",
    "epochs",
    "prefetch",
    "report",
    "steps",
]


def test_public_names_are_pinned():
    assert fleet.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name):
    value = getattr(fleet, name)
    assert value.__name__ == name
    assert name in dir(fleet)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fleet' has no attribute 'DistributedTranspiler'"):
        _ = fleet.DistributedTranspiler


INSTEAD = {
    "CompiledProgram": "fleet.Executor, in one process for each device (python -m fleet.launch)",
    "BuildStrategy": "PyTorch runs the model, and has settings of its own",
    "ExecutionStrategy": "PyTorch runs the model, and has settings of its own",
    "DGCMomentumOptimizer": "see strategy.wire_dtype and strategy.power_sgd",
}


@pytest.mark.parametrize("name", fleet._NOT_HERE)
def test_a_name_of_the_originals_says_what_to_do_instead(name):
    with pytest.raises(AttributeError) as error:
        getattr(fleet, name)
    assert str(error.value).startswith(f"fleet has no {name}: ")
    assert INSTEAD[name] in str(error.value)


@pytest.mark.programs
def test_importing_the_package_and_its_pure_parts_does_not_import_torch():
    program = (
        "import sys, fleet, fleet.role_maker; fleet.Program(); fleet.DistributeTranspiler();"
        "fleet.CPUPlace(); fleet.DistributedStrategy(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
