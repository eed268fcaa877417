"""The configuration: each field is honoured or refused by its name."""

from dataclasses import fields
from typing import Any

import pytest

from fleet.errors import TranspileError
from fleet.plan import DistributeTranspilerConfig, HashName, RoundRobin


def test_the_fields_and_defaults_are_the_original_s():
    config = DistributeTranspilerConfig()
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "slice_var_up": True,
        "split_method": RoundRobin,
        "min_block_size": 8192,
        "enable_dc_asgd": False,
        "mode": "pserver",
        "print_log": False,
        "wait_port": True,
        "runtime_split_send_recv": False,
        "sync_mode": True,
        "half_async": False,
        "completely_not_async": False,
        "geo_sgd_mode": False,
        "geo_sgd_need_push_nums": 100,
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
        "collective_mode": None,
        "remote_prefetch": True,
    }
    config.check()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("slice_var_upp", r"\(did you mean slice_var_up\?\)", id="a-typing-mistake"),
        pytest.param("min_blocksize", r"\(did you mean min_block_size\?\)", id="another"),
        pytest.param("colour", r"no field 'colour'; its fields are slice_var_up, split_method", id="foreign"),
    ],
)
def test_an_unknown_field_is_an_error_that_helps(name, words):
    make: Any = DistributeTranspilerConfig
    with pytest.raises(AttributeError, match=words):
        setattr(make(), name, 1)
    with pytest.raises(TypeError, match=words):
        make(**{name: 1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"mode": "ps"}, r"config\.mode is 'ps'; expected 'pserver'", id="an-unknown-mode"),
        pytest.param({"wait_port": None}, r"config\.wait_port is None", id="none"),
        pytest.param({"min_block_size": 1e4}, r"is 10000\.0; expected a whole number", id="a-fraction"),
        pytest.param({"split_method": HashName(["a"])}, "expected RoundRobin, HashName or", id="an-instance"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes, words):
    config: Any = DistributeTranspilerConfig(**changes)
    with pytest.raises(TranspileError, match=words):
        config.check()


@pytest.mark.parametrize("method", [RoundRobin, HashName])
def test_a_dispatcher_may_be_named_by_text(method):
    named = DistributeTranspilerConfig(split_method=method.__name__)
    assert named == DistributeTranspilerConfig(split_method=method)
    named.split_method = "RoundRobbin"  # type: ignore[assignment]
    with pytest.raises(TranspileError, match="'RoundRobbin'; expected RoundRobin, HashName or a subclass"):
        named.check()


def test_fields_may_be_set_one_by_one():
    config = DistributeTranspilerConfig()
    config.split_method, config.min_block_size, config.slice_var_up = HashName, 9000, False
    config.check()
    assert config == DistributeTranspilerConfig(
        split_method=HashName, min_block_size=9000, slice_var_up=False
    )
