"""Data, and the other names of ``fluid.framework`` and ``fluid.core``."""

import pytest
import torch

from fleet import fluid


def test_data_keep_their_shape():
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.unique_name.guard():
        x = fluid.data("x", [None, 3], dtype="int64", lod_level=1)
        assert (x.name, x.shape, x.dtype, x.lod_level, x.stop_gradient) == ("x", (-1, 3), "int64", 1, True)
        assert fluid.layers.data("y", [3]).shape == (-1, 3)
        predicted = fluid.layers.fc(fluid.data("z", [-1, 2]), 1)
        parameters = [
            each.name
            for each in fluid.default_main_program().list_vars()
            if isinstance(each, fluid.framework.Parameter)
        ]
        assert parameters == ["fc_0.w_0", "fc_0.b_0"]
        assert not isinstance(predicted, fluid.framework.Parameter)


def test_a_name_scope_changes_no_name():
    own = fluid.program_guard(fluid.Program(), fluid.Program())
    with own, fluid.unique_name.guard(), fluid.name_scope("encoder"):
        assert fluid.layers.fc(fluid.data("z", [-1, 2]), 1).name == "fc_0.tmp_1"


def test_gpus_are_those_of_pytorch():
    assert fluid.is_compiled_with_cuda() == torch.cuda.is_available()
    assert fluid.core.get_cuda_device_count() == torch.cuda.device_count()


def test_dtypes_of_core_are_those_of_variables():
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.unique_name.guard():
        assert fluid.data("x", [-1, 2]).dtype == fluid.core.VarDesc.VarType.FP32
        assert fluid.data("y", [-1, 2], dtype=fluid.core.VarDesc.VarType.INT64).dtype == "int64"


def test_other_names_of_core_are_refused():
    with pytest.raises(
        AttributeError, match=r"fluid\.core\.Place is not in fleet\.fluid; use fluid\.CPUPlace"
    ):
        _ = fluid.core.Place  # type: ignore[attr-defined]
