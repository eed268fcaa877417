"""Scripts that minimize a loss, against paddlepaddle 1.8.5: programs, a clone for tests, and six steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet import fluid
from fleet.fluid import unique_name
from fleet.fluid.program import Program, program_guard
from fleet.fluid.scope import Scope, global_scope, scope_guard
from tests.support.fluid import as_recorded, check_blocks, recorded_feeds
from tests.support.fluid_scripts import SCRIPTS

GOLDEN = Path(__file__).parents[3] / "golden" / "fluid"
RECORD: dict[str, dict[str, Any]] = json.loads((GOLDEN / "scripts.json").read_text())["scripts"]
ARRAYS = dict(np.load(GOLDEN / "scripts.npz"))


@pytest.fixture(params=RECORD)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("part", ["main", "startup", "test"])
def test_a_script_s_programs_are_the_original_s(name: str, part: str) -> None:
    main, startup = Program(), Program()
    with unique_name.guard(), program_guard(main, startup):
        assert SCRIPTS[name](fluid).name == RECORD[name]["loss"]
        programs = {"main": main, "startup": startup, "test": main.clone(for_test=True)}
    check_blocks(as_recorded(programs[part]), RECORD[name][part])


def test_a_script_trains_as_the_original_does(name: str) -> None:
    main, startup = Program(), Program()
    with unique_name.guard(), program_guard(main, startup), scope_guard(Scope()):
        loss = SCRIPTS[name](fluid)
        executor = fluid.Executor(fluid.CPUPlace())
        executor.run(startup)
        parameters = [each.name for each in main.all_parameters()]
        for each in parameters:
            tensor_of(each).set(ARRAYS[f"{name}/initial/{each}"])
        feeds = recorded_feeds(ARRAYS, name, RECORD[name]["lengths"], steps=6)
        losses = [executor.run(main, feed=feed, fetch_list=[loss])[0] for feed in feeds]
        np.testing.assert_allclose(np.array(losses), ARRAYS[f"{name}/losses"], rtol=2e-5, atol=2e-6)
        for each in parameters:
            expected = ARRAYS[f"{name}/final/{each}"]
            # The gradient of the key's bias is 0 but for rounding, which Adam multiplies.
            tolerance = 2e-4 if name == "a_block_of_bert" else 6e-6
            found = np.array(tensor_of(each))
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=each)


def tensor_of(name: str) -> Any:
    variable = global_scope().find_var(name)
    assert variable is not None
    return variable.get_tensor()
