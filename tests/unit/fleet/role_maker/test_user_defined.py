import re
from typing import Any

import pytest

from fleet.errors import RoleError
from fleet.role_maker import (
    Role,
    RoleKind,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)

SERVERS = ["10.0.0.1:6174", "10.0.0.2:6174"]


def test_the_original_s_names_of_the_kinds():
    assert Role.WORKER is RoleKind.WORKER
    assert Role.SERVER is RoleKind.SERVER
    assert (int(Role.WORKER), int(Role.SERVER)) == (1, 2)


def test_a_worker():
    made = UserDefinedRoleMaker(1, Role.WORKER, 2, SERVERS).generate_role({"FLEET_JOB_NAME": "mine"})
    assert made.kind is RoleKind.WORKER
    assert (made.index, made.worker_num, made.server_endpoints) == (1, 2, tuple(SERVERS))
    assert (made.current_endpoint, made.job.name, made.is_first_worker) == ("", "mine", False)


def test_a_server():
    made = UserDefinedRoleMaker(
        current_id=1, role=Role.SERVER, worker_num=2, server_endpoints=",".join(SERVERS)
    ).generate_role({})
    assert made.is_server
    assert (made.index, made.current_endpoint, made.current_host) == (1, SERVERS[1], "10.0.0.2")


def test_a_collective_worker():
    made = UserDefinedCollectiveRoleMaker(current_id=1, worker_endpoints=SERVERS).generate_role({})
    assert (made.index, made.worker_num, made.is_collective) == (1, 2, True)
    assert (made.current_endpoint, made.worker_endpoints) == (SERVERS[1], tuple(SERVERS))


# Called with what the annotations forbid too.
user_defined: Any = UserDefinedRoleMaker
user_defined_collective: Any = UserDefinedCollectiveRoleMaker


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: user_defined(2, Role.WORKER, 2, SERVERS),
            "current_id is 2; expected .* 0 to 1",
            id="id",
        ),
        pytest.param(lambda: user_defined(2, Role.SERVER, 9, SERVERS), "current_id is 2", id="server-id"),
        pytest.param(lambda: user_defined("0", Role.WORKER, 2, SERVERS), "current_id is '0'", id="id-text"),
        pytest.param(lambda: user_defined(0, Role.WORKER, 0, SERVERS), "worker_num is 0", id="no-workers"),
        pytest.param(lambda: user_defined(0, Role.WORKER, True, SERVERS), "worker_num is True", id="flag"),
        pytest.param(lambda: user_defined(0, 7, 1, SERVERS), "role is 7; expected Role.WORKER", id="role"),
        pytest.param(
            lambda: user_defined(0, Role.WORKER, 1, []),
            "server_endpoints is []: it is empty",
            id="no-servers",
        ),
        pytest.param(
            lambda: user_defined(0, Role.WORKER, 1, None),
            "server_endpoints is None",
            id="servers-none",
        ),
        pytest.param(
            lambda: user_defined(0, Role.WORKER, 1, [SERVERS[0]] * 2),
            "occurs twice",
            id="twice",
        ),
        pytest.param(
            lambda: user_defined_collective(0, ["a"]),
            "worker_endpoints is ['a']: 'a' is not",
            id="malformed",
        ),
        pytest.param(
            lambda: user_defined_collective(2, SERVERS),
            "current_id is 2",
            id="collective-id-too-large",
        ),
    ],
)
def test_arguments_that_describe_no_replica_are_an_error(make, message):
    with pytest.raises(RoleError, match=message if ".*" in message else re.escape(message)):
        make()
