"""An executor's place selects the trainer's GPU; a different one in the environment is an error."""

import pytest

from fleet.errors import ConfigurationError
from fleet.fluid.collective_executor import take_gpu


@pytest.mark.parametrize(
    ("environ", "count", "selected"),
    [
        pytest.param({}, 2, "1", id="nobody-names-one"),
        pytest.param({"FLAGS_selected_gpus": "1"}, 2, "1", id="the-launcher-names-it"),
        pytest.param({"LOCAL_RANK": "1"}, 2, None, id="it-is-the-local-rank-s"),
        pytest.param({"LOCAL_RANK": "2"}, 2, None, id="there-are-more-trainers-than-gpus"),
    ],
)
def test_the_gpu_of_a_place_is_the_trainers_own(environ, count, selected):
    take_gpu(1, environ, count)
    assert environ.get("FLAGS_selected_gpus") == selected


@pytest.mark.parametrize("name", ["FLAGS_selected_gpus", "LOCAL_RANK"])
def test_another_than_the_environments_is_named(name):
    said = rf"CUDAPlace\(1\), and {name} is '0', by which GPU 0 is .* expected fleet\.CUDAPlace\(0\)"
    with pytest.raises(ConfigurationError, match=said):
        take_gpu(1, {name: "0"}, 2)
