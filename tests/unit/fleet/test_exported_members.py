"""The package's public names, all of them and nothing else, for scripts and for type checkers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fleet
from fleet import typed
from fleet.collective import fleet as collective
from fleet.parameter_server import fleet as parameter_server

ROOT = Path(__file__).parents[3]

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


def test_type_checkers_are_told_what_is_there():
    told = typed._PublicNames()
    assert set(dir(fleet)) >= fleet.NAMES.keys()
    for name in fleet.NAMES:
        assert getattr(typed, name) is getattr(fleet, name)
        for singleton in (parameter_server, collective):
            if name in fleet.__all__ and hasattr(told, name):
                assert getattr(singleton, name) is getattr(told, name)
    for package in ("nn", "tables"):
        assert vars(getattr(told, package)) == {
            name: getattr(getattr(fleet, package), name) for name in getattr(fleet, package).__all__
        }


@pytest.mark.parametrize(
    "singleton", [pytest.param(parameter_server, id="servers"), pytest.param(collective, id="collective")]
)
def test_both_singletons_have_and_list_every_public_name(singleton):
    assert set(dir(singleton)) >= {*fleet.NAMES, *dir(type(singleton))}
    for name in dir(singleton):
        if name in fleet.NAMES and not hasattr(type(singleton), name):
            assert getattr(singleton, name) is getattr(fleet, name)


def test_a_mistyped_name_is_an_error_that_says_which_was_meant():
    with pytest.raises(AttributeError, match=re.escape("'CPUPlac' (did you mean CPUPlace?)")) as error:
        _ = fleet.CPUPlac  # type: ignore[attr-defined]
    assert error.value.name == "CPUPlac"
    for singleton in (parameter_server, collective):
        for wrong, meant in {
            "distributed_optimzer": "distributed_optimizer",
            "reprt": "report",
            "Executer": "Executor",
        }.items():
            with pytest.raises(AttributeError, match=rf"'{wrong}' \(did you mean {meant}\?\)$"):
                getattr(singleton, wrong)
    assert not hasattr(parameter_server, "nothing_of_the_kind")


CALLS = sorted(
    name
    for name in {*dir(type(parameter_server)), *dir(type(collective))}
    if not name.startswith("_") and name not in fleet.NAMES and name != "metrics"  # a subpackage
)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_job_on_the_package_says_which_import_is_meant(name):
    with pytest.raises(AttributeError) as error:
        getattr(fleet, name)
    assert "'from fleet.parameter_server import fleet'" in str(error.value)
    assert "'from fleet.collective import fleet'" in str(error.value)
    assert name == "step" or "did you mean" not in str(error.value)


def test_a_traceback_adds_no_guess_of_pythons_own():
    ended = subprocess.run(
        [sys.executable, "-c", "import fleet; fleet.BuildStrategy"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr.endswith("PyTorch runs the model, and has its own settings\n")


INSTEAD = {
    "CompiledProgram": "fleet.Executor, in one process for each device (python -m fleet.launch)",
    "BuildStrategy": "PyTorch runs the model, and has its own settings",
    "ExecutionStrategy": "PyTorch runs the model, and has its own settings",
    "DGCMomentumOptimizer": "see strategy.wire_dtype and strategy.power_sgd",
}


@pytest.mark.parametrize("name", fleet._NOT_HERE)
@pytest.mark.parametrize(
    "owner", [pytest.param(fleet, id="package"), pytest.param(parameter_server, id="singleton")]
)
def test_a_name_of_the_originals_says_what_to_do_instead(owner, name):
    with pytest.raises(AttributeError) as error:
        getattr(owner, name)
    assert str(error.value).startswith(f"fleet has no {name}: ")
    assert INSTEAD[name] in str(error.value)


@pytest.mark.programs
def test_importing_the_package_and_its_pure_parts_does_not_import_torch():
    program = (
        "import sys, fleet, fleet.role_maker; fleet.Program(); fleet.DistributeTranspiler();"
        "fleet.CPUPlace(); fleet.DistributedStrategy(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


CHECKED = """
from typing import assert_type

import fleet as package
import torch
from fleet import CPUPlace, DistributedStrategy, Executor, Program, TrainStatus
from fleet.collective import fleet as collective
from fleet.nn import DistributedEmbedding
from fleet.parameter_server import fleet
from fleet.role_maker import PaddleCloudRoleMaker


def train(model: torch.nn.Module, loss: torch.Tensor) -> None:
    fleet.init(PaddleCloudRoleMaker())
    assert_type(fleet.create_geo_strategy(update_frequency=5, cross_step=False), DistributedStrategy)
    strategy = fleet.DistributedStrategy(overlap=True)
    strategy.wire_dtype = "bfloat16"
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model)
    optimizer.minimize(model.forward)
    assert_type(fleet.nn.DistributedEmbedding(10, 4), DistributedEmbedding)
    assert_type(fleet.Executor(fleet.CPUPlace()), Executor)
    assert_type(fleet.main_program, Program)
    assert_type(collective.load_check_point(path="here"), TrainStatus)
    fleet.report(step=3, loss=loss, metrics={"accuracy": 0.5})
    for epoch, batches in collective.epochs(3, [1.5]):
        assert_type(batches, list[float])
    for batch in fleet.prefetch(["a"], {}):
        assert_type(batch, str)
    assert_type(package.CPUPlace(), CPUPlace)
    package.report(step=4)
    package.nn.DistributedEmbedding(10, 4)


fleet.distributed_optimzer(1)  # attr-defined
collective.distributed_optimzer(1)  # attr-defined
fleet.report(stp=3)  # call-arg
package.report(stp=3)  # call-arg
fleet.create_geo_strategy(update_frequncy=5)  # call-arg
fleet.create_sync_strategy(overlp=True)  # call-arg
fleet.create_sync_strategy(overlap="yes")  # arg-type
fleet.DistributedStrategy(overlp=True)  # call-arg
fleet.DistributedStrategy().overlp = True  # attr-defined
fleet.nn.DistributedEmbeding(10, 4)  # attr-defined
fleet.CPUPlac()  # attr-defined
package.distributed_optimizer(1)  # attr-defined
package.CPUPlac()  # attr-defined
"""


@pytest.mark.programs
@pytest.mark.timeout(600)
def test_type_checkers_find_mistakes_and_nothing_else(tmp_path):
    """As a user's own ``mypy --strict`` does, with the package as it is installed.

    It skips torch, which takes most of the time to read: none of these types is one of torch's.
    """
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(CHECKED)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ROOT / ".mypy_cache" / "script", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^script\.py:(\d+): error: .*\[([\w-]+)\]$", ended.stdout, re.MULTILINE)
    mistakes = re.findall(r"^(.*)  # ([\w-]+)$", CHECKED, re.MULTILINE)
    lines = CHECKED.splitlines()
    assert [(lines[int(number) - 1].split("  #")[0], code) for number, code in found] == mistakes, (
        ended.stdout + ended.stderr
    )
