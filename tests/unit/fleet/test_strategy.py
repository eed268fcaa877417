import copy
import dataclasses
from typing import Any

import pytest

import fleet
from fleet import DistributedStrategy
from fleet.errors import ConfigurationError, TranspileError
from fleet.plan import DistributedMode, DistributeTranspilerConfig
from fleet.role_maker.variables import SYNC_MODES
from fleet.strategy import ORIGINALS, strategy_of


class Named:
    """A mode of the user's own, as far as a strategy looks at it."""

    name = "named"
    programs = DistributedMode.ASYNC

    def agreement(self):
        return {}


class Local(Named):
    """One whose trainers step by themselves."""

    steps_locally = True


def test_defaults():
    strategy = DistributedStrategy()
    assert dataclasses.asdict(strategy) | {"transpiler": None} == {
        "sync_mode": None,
        "mode": None,
        "overlap": None,
        "cross_step": False,
        "server_kernels": "default",
        "transport": "auto",
        "wire_dtype": None,
        "local_sgd": None,
        "power_sgd": None,
        "broadcast_buffers": True,
        "grad_clip": None,
        "non_finite": "warn",
        "transpiler": None,
    }
    assert strategy.transpiler.slice_var_up is True


def test_fields_may_be_set_one_by_one():
    strategy = DistributedStrategy()
    strategy.sync_mode = False
    strategy.overlap = False
    assert strategy == DistributedStrategy(sync_mode=False, overlap=False)
    assert mode_of(strategy) is DistributedMode.HALF_ASYNC


def test_what_is_set_later_is_checked_at_once_and_the_whole_when_it_is_read():
    strategy = DistributedStrategy()
    with pytest.raises(ConfigurationError, match=r"strategy\.transport is 'udp'; expected auto"):
        strategy.transport = "udp"
    strategy.wire_dtype, strategy.transport = "bfloat16", "shared_memory"
    with pytest.raises(ConfigurationError, match="which sends no tensors over the network"):
        strategy.resolved("Sync")
    strategy.transport = "auto"
    strategy.transpiler.geo_sgd_mode = True
    strategy.sync_mode = True
    with pytest.raises(ConfigurationError, match=r"strategy\.transpiler requests geo"):
        strategy.resolved("Sync")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("overlapp", r"\(did you mean overlap\?\); its fields are sync_mode", id="a-mistake"),
        pytest.param("nccl_comm_num", r"set strategy\.transpiler\.nccl_comm_num", id="the-config-s"),
    ],
)
def test_a_field_that_there_is_not_says_what_there_is(name, words):
    with pytest.raises(AttributeError, match=f"no field '{name}'.*{words}"):
        setattr(DistributedStrategy(), name, True)
    makers: tuple[Any, ...] = (DistributedStrategy, fleet.create_geo_strategy)
    for make in makers:
        with pytest.raises(TypeError, match=f"no field '{name}'.*{words}"):
            make(**{name: True})


INSTEAD = {
    **dict.fromkeys(
        ("use_local_sgd", "local_sgd_config", "localsgd", "localsgd_configs"),
        "set strategy.local_sgd = fleet.LocalSGD(k_steps=8)",
    ),
    **dict.fromkeys(
        ("adaptive_localsgd", "adaptive_localsgd_configs"),
        "set strategy.local_sgd = fleet.LocalSGD(k_steps=8, begin_step=30)",
    ),
    "use_dgc": "use wire_dtype='bfloat16' or power_sgd",
    **dict.fromkeys(("use_amp", "amp_loss_scaling"), "under torch.autocast"),
    **dict.fromkeys(("forward_recompute", "recompute_checkpoints"), "use torch.utils.checkpoint"),
    **dict.fromkeys(
        ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "bucket_cap_mb", "gradient_as_bucket_view"),
        "in torch's buckets",
    ),
    **dict.fromkeys(("find_unused_parameters", "static_graph"), "in every pass which parameters"),
    "sync_batch_norm": "pass the model to torch.nn.SyncBatchNorm.convert_sync_batchnorm, on GPUs",
    **dict.fromkeys(("exec_strategy", "build_strategy"), "PyTorch runs the model"),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_field_of_anothers_strategy_says_what_to_do_instead(name):
    with pytest.raises(AttributeError) as error:
        setattr(DistributedStrategy(), name, True)
    assert str(error.value).startswith(f"DistributedStrategy has no field {name!r}: ")
    assert INSTEAD[name] in str(error.value)
    given: dict[str, Any] = {name: True}
    with pytest.raises(TypeError) as made:
        DistributedStrategy(**given)
    assert str(made.value) == str(error.value)


def test_a_copy_of_a_strategy_is_equal():
    strategy = DistributedStrategy(sync_mode=False, overlap=False)
    assert copy.deepcopy(strategy) == strategy


def test_a_config_alone_is_a_strategy():
    config = DistributeTranspilerConfig(sync_mode=False, min_block_size=9000)
    assert strategy_of(config) == DistributedStrategy(transpiler=config)
    assert mode_of(strategy_of(config)) is DistributedMode.HALF_ASYNC
    assert strategy_of(None) == DistributedStrategy()
    with pytest.raises(ConfigurationError, match=r"strategy is 'async'; expected a fleet\.Dist"):
        strategy_of("async")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy",
    [
        DistributedStrategy(sync_mode=False, transpiler=DistributeTranspilerConfig(enable_dc_asgd=True)),
        strategy_of(DistributeTranspilerConfig(sync_mode=False, enable_dc_asgd=True)),
    ],
)
def test_compensating_for_delay_is_async_where_no_mode_is_named(strategy):
    assert mode_of(strategy) is DistributedMode.ASYNC


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync_mode": "Sync"}, r"strategy\.sync_mode is 'Sync'; expected True or False"),
        ({"overlap": 1}, r"strategy\.overlap is 1; expected True or False"),
        ({"cross_step": 1}, r"strategy\.cross_step is 1; expected True or False"),
        ({"server_kernels": "foreach"}, r"strategy\.server_kernels is 'foreach'; expected default or fused"),
        ({"transport": "udp"}, r"strategy\.transport is 'udp'; expected auto or tcp or shared_memory"),
        (
            {"wire_dtype": "float8"},
            r"strategy\.wire_dtype is 'float8'; expected 'bfloat16', 'float16', or None",
        ),
        ({"local_sgd": 8}, r"strategy\.local_sgd is 8; expected a fleet\.LocalSGD or None"),
        (
            {"local_sgd": fleet.LocalSGD(), "wire_dtype": "bfloat16"},
            r"strategy\.local_sgd is LocalSGD.* and strategy\.wire_dtype is 'bfloat16': only one kind",
        ),
        (
            {"power_sgd": fleet.PowerSGD(), "wire_dtype": "bfloat16"},
            r"strategy\.power_sgd is PowerSGD.* and strategy\.wire_dtype is 'bfloat16': only one kind",
        ),
        (
            {
                "local_sgd": fleet.LocalSGD(),
                "transpiler": DistributeTranspilerConfig(collective_mode="grad_allreduce"),
            },
            "collective_mode is 'grad_allreduce'; leave one of them",
        ),
        (
            {"local_sgd": fleet.LocalSGD(), "non_finite": "skip"},
            "non_finite is 'skip', which needs averaged gradients",
        ),
        (
            {"wire_dtype": "bfloat16", "transport": "shared_memory"},
            r"strategy\.transport is 'shared_memory', which sends no tensors over the network",
        ),
        (
            {"wire_dtype": "bfloat16", "transpiler": DistributeTranspilerConfig(enable_dc_asgd=True)},
            r"wire_dtype is 'bfloat16', and transpiler\.enable_dc_asgd compensates",
        ),
        ({"non_finite": True}, r"strategy\.non_finite is True; expected warn, stop or skip"),
        ({"overlap": True, "non_finite": "skip"}, r"overlap is True, and strategy\.non_finite is 'skip'"),
        ({"grad_clip": 5.0}, r"strategy\.grad_clip is 5\.0; expected None, fleet\.ClipGradByValue\(max\)"),
        ({"mode": "geo"}, r"strategy\.mode is 'geo'; expected an instance of a subclass of fleet\.param"),
        (
            {"sync_mode": True, "transpiler": DistributeTranspilerConfig(sync_mode=False)},
            r"strategy\.sync_mode is True, but strategy\.transpiler requests half_async",
        ),
        (
            {"sync_mode": True, "transpiler": DistributeTranspilerConfig(geo_sgd_mode=True)},
            r"strategy\.sync_mode is True, but strategy\.transpiler requests geo",
        ),
        (
            {
                "sync_mode": False,
                "transpiler": DistributeTranspilerConfig(sync_mode=False, completely_not_async=True),
            },
            r"strategy\.sync_mode is False, but strategy\.transpiler requests sync",
        ),
        (
            {"mode": Named(), "sync_mode": False},
            r"strategy\.mode is 'named', but strategy\.sync_mode = False requests asynchronous",
        ),
        (
            {"mode": Named(), "transpiler": DistributeTranspilerConfig(half_async=True)},
            r"strategy\.mode is 'named', but strategy\.transpiler requests half_async",
        ),
        (
            {"transpiler": DistributeTranspilerConfig(geo_sgd_mode=True, half_async=True)},
            r"strategy\.transpiler: config\.geo_sgd_mode = True and config\.half_async = True",
        ),
        (
            {"mode": Local(), "server_kernels": "fused"},
            r"server_kernels is 'fused', but .* strategy\.mode the servers do not step; .*fused=True",
        ),
        ({"mode": "nccl2"}, r"Paddle's mode is strategy\.transpiler\.mode"),
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


CONFIGS: dict[DistributedMode, dict[str, Any]] = {
    DistributedMode.ASYNC: {"sync_mode": False, "runtime_split_send_recv": True},
    DistributedMode.HALF_ASYNC: {"sync_mode": False, "half_async": True},
    DistributedMode.GEO: {"sync_mode": False, "geo_sgd_mode": True},
}


def mode_of(strategy: DistributedStrategy, job: str = "Sync") -> DistributedMode:
    """Return the mode that a program is transpiled for."""
    resolved = strategy.resolved(job)
    return resolved.transpiler.distributed_mode(bool(resolved.sync_mode))


@pytest.mark.parametrize(("job", "mode"), list(zip(SYNC_MODES, DistributedMode, strict=True)))
def test_the_job_decides_what_the_strategy_leaves_open(job, mode):
    strategy = DistributedStrategy(overlap=False)
    assert mode_of(strategy, job) is mode
    assert strategy.resolved(job).overlap is False
    assert strategy == DistributedStrategy(overlap=False)


@pytest.mark.parametrize("job", SYNC_MODES)
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        pytest.param(DistributedStrategy(sync_mode=True), DistributedMode.SYNC, id="sync"),
        pytest.param(DistributedStrategy(sync_mode=False), DistributedMode.HALF_ASYNC, id="not-sync"),
        *(
            pytest.param(
                DistributedStrategy(transpiler=DistributeTranspilerConfig(**fields)),
                mode,
                id=f"config-of-{mode.name.lower()}",
            )
            for mode, fields in CONFIGS.items()
        ),
        pytest.param(fleet.create_sync_strategy(), DistributedMode.SYNC, id="create-sync"),
        pytest.param(fleet.create_async_strategy(), DistributedMode.ASYNC, id="create-async"),
        pytest.param(fleet.create_half_async_strategy(), DistributedMode.HALF_ASYNC, id="create-half-async"),
        pytest.param(fleet.create_geo_strategy(), DistributedMode.GEO, id="create-geo"),
    ],
)
def test_what_the_strategy_says_counts_whatever_the_job_says(strategy, mode, job):
    assert mode_of(strategy, job) is mode


def test_the_factory_has_the_four_strategies():
    assert fleet.StrategyFactory.create_geo_strategy(7) == fleet.create_geo_strategy(update_frequency=7)
    for name in ("sync", "async", "half_async"):
        made = getattr(fleet.StrategyFactory, f"create_{name}_strategy")()
        assert made == getattr(fleet, f"create_{name}_strategy")()


def test_geo_pushes_as_often_as_the_strategy_says():
    assert fleet.create_geo_strategy().transpiler.geo_sgd_need_push_nums == 100
    assert fleet.create_geo_strategy(7).transpiler.geo_sgd_need_push_nums == 7


def test_a_created_strategy_keeps_the_rest_of_its_config_and_changes_no_config_of_the_script():
    config = DistributeTranspilerConfig(min_block_size=16384, enable_dc_asgd=True)
    strategy = fleet.create_async_strategy(transpiler=config, overlap=False)
    assert (strategy.transpiler.min_block_size, strategy.transpiler.enable_dc_asgd) == (16384, True)
    assert strategy.overlap is False
    assert config == DistributeTranspilerConfig(min_block_size=16384, enable_dc_asgd=True)


def test_what_belongs_to_another_mode_than_the_jobs_is_named():
    strategy = DistributedStrategy(transpiler=DistributeTranspilerConfig(enable_dc_asgd=True))
    assert mode_of(strategy, "Async") is DistributedMode.ASYNC
    with pytest.raises(TranspileError, match=r"enable_dc_asgd = True .* the mode is geo"):
        mode_of(strategy, "Geo")


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ConfigurationError, match="'sync'; expected one of Sync, Async, HalfAsync, Geo"):
        DistributedStrategy().resolved("sync")


def test_the_configs_local_sgd_averages_after_every_step():
    config = DistributeTranspilerConfig(collective_mode="local_sgd")
    assert DistributedStrategy(transpiler=config).parameters_averaged() == fleet.LocalSGD(k_steps=1)
    own = fleet.LocalSGD(k_steps=8)
    assert DistributedStrategy(transpiler=config, local_sgd=own).parameters_averaged() is own
    assert DistributedStrategy().parameters_averaged() is None
