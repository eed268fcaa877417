"""Programs, names and values of a test's own."""

from collections.abc import Iterator

import pytest

from fleet.fluid import unique_name
from fleet.fluid.program import Program, program_guard
from fleet.fluid.scope import Scope, scope_guard


@pytest.fixture
def own_programs() -> Iterator[None]:
    """Give a test its own default programs, names of variables and scope."""
    with unique_name.guard(), program_guard(Program(), Program()), scope_guard(Scope()):
        yield
