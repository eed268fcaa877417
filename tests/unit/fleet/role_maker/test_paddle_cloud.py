"""Roles from the environment: every variable present, missing, empty, malformed, contradicted."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import RoleError
from fleet.role_maker import JobIdentity, PaddleCloudRoleMaker, Role, RoleKind

ONE, TWO = "10.0.0.1:6174", "10.0.0.2:6174"
LISTED = {"PADDLE_PSERVERS_IP_PORT_LIST": f"{ONE},{TWO}", "PADDLE_TRAINERS_NUM": "3"}
TRAINER = {**LISTED, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}
SERVER = {**LISTED, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6174"}
QUICK_START = {
    "PADDLE_PSERVER_IPS": "10.0.0.1,10.0.0.2",
    "PADDLE_PSERVER_PORT": "6174",
    "PADDLE_TRAINERS": "3",
}
QUICK_TRAINER = {**QUICK_START, "PADDLE_TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}
QUICK_SERVER = {**QUICK_START, "PADDLE_TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_IP": "10.0.0.2"}
WORKER = {
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6175,10.0.0.2:6175",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6175",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINING_ROLE": "TRAINER",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
AGENT = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1"}


def role(environ: Mapping[str, str], *, is_collective: bool = False) -> Role:
    return PaddleCloudRoleMaker(is_collective=is_collective).generate_role(environ)


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ", [TRAINER, QUICK_TRAINER, TRAINER | QUICK_TRAINER], ids=["list", "ips", "both"]
)
def test_a_trainer(environ):
    assert role(environ) == Role(
        kind=RoleKind.WORKER, index=1, worker_num=3, server_endpoints=(ONE, TWO), job=JobIdentity()
    )


@pytest.mark.parametrize(
    "environ", [SERVER, QUICK_SERVER, SERVER | QUICK_SERVER], ids=["list", "ips", "both"]
)
def test_a_parameter_server(environ):
    assert role(environ) == Role(
        kind=RoleKind.SERVER,
        index=1,
        worker_num=3,
        server_endpoints=(ONE, TWO),
        current_endpoint=TWO,
        current_host="10.0.0.2",
    )


def test_servers_on_one_host_are_told_apart_by_their_ports():
    environ = SERVER | {
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6170,127.0.0.1:6171",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "6171",
    }
    assert role(environ).index == 1


@pytest.mark.parametrize(
    ("listed", "port", "last"),
    [
        pytest.param({"PADDLE_PSERVER_IPS": "s-[0-699].job"}, 6174, 6174, id="by-their-hosts"),
        pytest.param(
            {"PADDLE_PSERVER_IPS": "s-[0-699].job", "PADDLE_PSERVERS_IP_PORT_LIST": "s-[0-699].job:6174"},
            6174,
            6174,
            id="by-both-variables",
        ),
        pytest.param(
            {"PADDLE_PSERVERS_IP_PORT_LIST": "s-[0-699].job:[20000-20000+2]"},
            20010,
            21398,
            id="of-nodes-that-pods-share",
        ),
    ],
)
def test_hundreds_of_servers_come_by_a_pattern(listed, port, last):
    environ = {"TRAINING_ROLE": "PSERVER", "POD_IP": "s-5.job", "PADDLE_PORT": str(port), **listed}
    found = role(environ | {"PADDLE_TRAINERS_NUM": "1000", "PADDLE_PSERVER_ID": "5"})
    assert (found.index, found.current_endpoint) == (5, f"s-5.job:{port}")
    assert (len(found.server_endpoints), found.server_endpoints[-1]) == (700, f"s-699.job:{last}")


def test_the_port_is_6174_when_nobody_says():
    environ = {name: value for name, value in QUICK_SERVER.items() if name != "PADDLE_PSERVER_PORT"}
    assert role(environ).current_endpoint == TWO


def test_blanks_around_values_do_not_count():
    environ = TRAINER | {"PADDLE_PSERVERS_IP_PORT_LIST": f" {ONE} , {TWO} ", "PADDLE_TRAINER_ID": " 1"}
    assert role(environ) == role(TRAINER)


def test_the_job_s_own_variables():
    environ = TRAINER | {
        "FLEET_JOB_NAME": "digits",
        "FLEET_JOB_UID": "0000-1",
        "FLEET_RESTARTS": "4",
        "FLEET_SYNC_MODE": "Geo",
        "FLEET_CHECKPOINT_DIR": "/checkpoint",
        "PADDLE_CURRENT_IP": "10.1.1.1",
    }
    made = role(environ)
    assert made.job == JobIdentity("digits", "0000-1", 4)
    assert (made.sync_mode, made.checkpoint_dir, made.current_host) == ("Geo", "/checkpoint", "10.1.1.1")


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        pytest.param(WORKER, "10.0.0.2:6175", id="launched"),
        pytest.param(WORKER | TORCHRUN, "10.0.0.2:6175", id="both"),
        pytest.param(
            {"PADDLE_TRAINER_ENDPOINTS": WORKER["PADDLE_TRAINER_ENDPOINTS"], **TORCHRUN},
            "10.0.0.2:6175",
            id="torchrun-in-a-job",
        ),
        pytest.param(TORCHRUN, "", id="torchrun-alone"),
        pytest.param(
            WORKER | AGENT | {"NODE_RANK": "1"}, "10.0.0.2:6175", id="torchrun-with-the-order-of-pods"
        ),
        pytest.param(
            WORKER | AGENT | {"NODE_RANK": "0", "PADDLE_TRAINER_ID": "0"},
            "",
            id="torchrun-with-an-order-of-its-own",
        ),
        pytest.param(
            without(WORKER, "PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT") | AGENT | {"NODE_RANK": "0"},
            "",
            id="torchrun-with-an-order-of-its-own-and-slots",
        ),
    ],
)
def test_a_collective_worker(environ, endpoint):
    made = role(environ, is_collective=True)
    assert (made.kind, made.index, made.worker_num, made.is_collective) == (RoleKind.WORKER, 1, 2, True)
    assert made.current_endpoint == endpoint
    assert made.worker_endpoints == (("10.0.0.1:6175", "10.0.0.2:6175") if endpoint else ())


@pytest.mark.parametrize(
    ("ports", "own", "last"),
    [
        pytest.param("[6175-6182]", 6178, 6182, id="that-are-the-same-in-each-pod"),
        pytest.param("[20000-20007+9]", 24503, 28998, id="of-nodes-that-pods-share"),
    ],
)
def test_the_endpoints_of_thousands_of_workers_come_by_a_pattern(ports, own, last):
    environ = {
        "PADDLE_TRAINER_ENDPOINTS": f"t-[0-999].job:{ports}",
        "PADDLE_TRAINER_ID": "4003",
        "PADDLE_CURRENT_ENDPOINT": f"t-500.job:{own}",
        "PADDLE_TRAINERS_NUM": "8000",
    }
    found = role(environ, is_collective=True)
    assert (found.index, found.worker_num, found.current_endpoint) == (4003, 8000, f"t-500.job:{own}")
    assert found.worker_endpoints[-1] == f"t-999.job:{last}"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param(
            without(TRAINER, "TRAINING_ROLE"),
            "TRAINING_ROLE or PADDLE_TRAINING_ROLE is not set; expected the role: TRAINER or PSERVER",
            id="role-missing",
        ),
        pytest.param(
            TRAINER | {"TRAINING_ROLE": ""}, "TRAINING_ROLE is empty; expected the role", id="role-empty"
        ),
        pytest.param(
            TRAINER | {"TRAINING_ROLE": "WORKER"},
            "TRAINING_ROLE is 'WORKER'; expected the role",
            id="role-unknown",
        ),
        pytest.param(
            TRAINER | {"PADDLE_TRAINING_ROLE": "PSERVER"},
            "TRAINING_ROLE is 'TRAINER' but PADDLE_TRAINING_ROLE is 'PSERVER'",
            id="role-contradicted",
        ),
        pytest.param(
            without(TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST"),
            "PADDLE_PSERVERS_IP_PORT_LIST is not set; expected the parameter servers (or PADDLE_PSERVER_IPS)",
            id="servers-missing",
        ),
        pytest.param(
            WORKER,
            "PADDLE_PSERVERS_IP_PORT_LIST is not set, but PADDLE_TRAINER_ENDPOINTS is: this job has the "
            "mode Collective, without parameter servers; expected `from fleet.collective import fleet`",
            id="a-collective-job",
        ),
        pytest.param(
            TRAINER | {"PADDLE_PSERVERS_IP_PORT_LIST": " "},
            "PADDLE_PSERVERS_IP_PORT_LIST is empty",
            id="servers-empty",
        ),
        pytest.param(
            TRAINER | {"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1"},
            "PADDLE_PSERVERS_IP_PORT_LIST is '10.0.0.1': '10.0.0.1' is not host:port; expected",
            id="server-without-port",
        ),
        pytest.param(
            TRAINER | {"PADDLE_PSERVERS_IP_PORT_LIST": f"{ONE},{ONE}"},
            f"'{ONE}' occurs twice",
            id="server-twice",
        ),
        pytest.param(
            QUICK_TRAINER | {"PADDLE_PSERVER_IPS": ""}, "PADDLE_PSERVER_IPS is empty", id="ips-empty"
        ),
        pytest.param(
            QUICK_TRAINER | {"PADDLE_PSERVER_IPS": "10.0.0.1,10.0.0.1"},
            "PADDLE_PSERVER_IPS is '10.0.0.1,10.0.0.1' and PADDLE_PSERVER_PORT '6174': '10.0.0.1:6174' "
            "occurs twice",
            id="ip-twice",
        ),
        pytest.param(
            QUICK_TRAINER | {"PADDLE_PSERVER_IPS": "10.0.0.1,"},
            "':6174' is not host:port",
            id="trailing-comma",
        ),
        pytest.param(
            QUICK_TRAINER | {"PADDLE_PSERVER_PORT": "http"}, "PADDLE_PSERVER_PORT 'http'", id="port-malformed"
        ),
        pytest.param(
            TRAINER | QUICK_TRAINER | {"PADDLE_PSERVER_IPS": "10.0.0.9"},
            "PADDLE_PSERVERS_IP_PORT_LIST is '10.0.0.1:6174,10.0.0.2:6174' but PADDLE_PSERVER_IPS",
            id="servers-contradicted",
        ),
        pytest.param(
            without(TRAINER, "PADDLE_TRAINERS_NUM"),
            "PADDLE_TRAINERS_NUM or PADDLE_TRAINERS is not set; expected the number of trainers, "
            "a whole number of at least 1",
            id="trainers-missing",
        ),
        pytest.param(
            TRAINER | {"PADDLE_TRAINERS_NUM": "0"}, "PADDLE_TRAINERS_NUM is '0'; expected", id="no-trainers"
        ),
        pytest.param(
            TRAINER | {"PADDLE_TRAINERS_NUM": "10.0.0.1"},
            "PADDLE_TRAINERS_NUM is '10.0.0.1'",
            id="trainers-listed",
        ),
        pytest.param(
            TRAINER | {"PADDLE_TRAINERS": "4"},
            "PADDLE_TRAINERS_NUM is '3' but PADDLE_TRAINERS is '4'",
            id="trainers-contradicted",
        ),
        pytest.param(without(TRAINER, "PADDLE_TRAINER_ID"), "PADDLE_TRAINER_ID is not set", id="id-missing"),
        pytest.param(TRAINER | {"PADDLE_TRAINER_ID": ""}, "PADDLE_TRAINER_ID is empty", id="id-empty"),
        pytest.param(
            TRAINER | {"PADDLE_TRAINER_ID": "3"},
            "PADDLE_TRAINER_ID is '3'; expected this trainer's index, a whole number from 0 to 2",
            id="id-too-large",
        ),
        pytest.param(TRAINER | {"PADDLE_TRAINER_ID": "-1"}, "PADDLE_TRAINER_ID is '-1'", id="id-negative"),
        pytest.param(TRAINER | {"PADDLE_TRAINER_ID": "1.0"}, "PADDLE_TRAINER_ID is '1.0'", id="id-not-whole"),
        pytest.param(TRAINER | {"PADDLE_TRAINER_ID": "²"}, "PADDLE_TRAINER_ID is '²'", id="id-superscript"),
        pytest.param(
            without(SERVER, "POD_IP"),
            "POD_IP or PADDLE_CURRENT_IP is not set; expected this server's host",
            id="ip",
        ),
        pytest.param(
            SERVER | {"POD_IP": "10.0.0.9"},
            "POD_IP is '10.0.0.9' and PADDLE_PORT is '6174', but 10.0.0.9:6174 is not among the "
            f"parameter servers; expected one of {ONE}, {TWO}",
            id="own-endpoint-not-listed",
        ),
        pytest.param(
            SERVER | {"PADDLE_PORT": "6175"},
            "but 10.0.0.2:6175 is not among the parameter servers",
            id="own-port",
        ),
        pytest.param(
            SERVER | {"PADDLE_CURRENT_IP": "10.0.0.1"},
            "POD_IP is '10.0.0.2' but PADDLE_CURRENT_IP is '10.0.0.1'",
            id="own-ip-contradicted",
        ),
        pytest.param(
            SERVER | {"PADDLE_PSERVER_ID": "0"},
            f"PADDLE_PSERVER_ID is '0', which is {ONE}, but this server is {TWO}; expected 1",
            id="server-id-contradicted",
        ),
        pytest.param(
            SERVER | {"PADDLE_PSERVER_ID": "2"},
            "PADDLE_PSERVER_ID is '2'; expected this server's index, a whole number from 0 to 1",
            id="server-id-too-large",
        ),
        pytest.param(
            TRAINER | {"FLEET_RESTARTS": "once"},
            "FLEET_RESTARTS is 'once'; expected how often this replica was restarted",
            id="restarts",
        ),
        pytest.param(
            TRAINER | {"FLEET_SYNC_MODE": "sync"},
            "FLEET_SYNC_MODE is 'sync'; expected the job's mode: Sync",
            id="mode",
        ),
    ],
)
def test_a_mistake_in_parameter_server_mode_is_named(environ, message):
    with pytest.raises(RoleError, match=re.escape(message)):
        role(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param(
            {"FLEET_JOB_NAME": "digits"},
            "PADDLE_TRAINER_ENDPOINTS is not set; expected all workers: host:port",
            id="nothing-but-a-name-is-set",
        ),
        pytest.param(
            QUICK_SERVER,
            "PADDLE_TRAINER_ENDPOINTS is not set, but PADDLE_PSERVER_IPS is: this job has the mode "
            "ParameterServer; expected `from fleet.parameter_server import fleet`",
            id="a-job-with-servers",
        ),
        pytest.param(
            WORKER | {"PADDLE_TRAINER_ENDPOINTS": ""}, "PADDLE_TRAINER_ENDPOINTS is empty", id="empty"
        ),
        pytest.param(
            WORKER | {"PADDLE_TRAINER_ENDPOINTS": "a:1,a:1"}, "'a:1' occurs twice", id="endpoint-twice"
        ),
        pytest.param(
            WORKER | {"PADDLE_TRAINING_ROLE": "PSERVER"},
            "the role in collective mode: TRAINER",
            id="a-server",
        ),
        pytest.param(
            WORKER | {"PADDLE_TRAINERS_NUM": "4"},
            "PADDLE_TRAINERS_NUM is '4' but PADDLE_TRAINER_ENDPOINTS has 2 endpoints",
            id="count",
        ),
        pytest.param(
            without(WORKER, "PADDLE_TRAINER_ID"), "PADDLE_TRAINER_ID or RANK is not set", id="no-rank"
        ),
        pytest.param(
            WORKER | {"PADDLE_TRAINER_ID": "2"}, "PADDLE_TRAINER_ID is '2'; expected", id="rank-too-large"
        ),
        pytest.param(
            without(WORKER, "PADDLE_TRAINER_ID") | {"NPROC_PER_NODE": "2"},
            "start the script with torchrun SCRIPT, or python -m fleet.launch SCRIPT",
            id="slots-without-a-launcher",
        ),
        pytest.param(
            WORKER | AGENT | {"WORLD_SIZE": "1"},
            "WORLD_SIZE is '1' but PADDLE_TRAINER_ENDPOINTS has 2 endpoints",
            id="torchrun-on-one-node-of-several",
        ),
        pytest.param(WORKER | {"RANK": "0"}, "PADDLE_TRAINER_ID is '1' but RANK is '0'", id="two-ranks"),
        pytest.param(
            WORKER | {"PADDLE_CURRENT_ENDPOINT": "10.0.0.9:1"},
            "PADDLE_CURRENT_ENDPOINT is '10.0.0.9:1', but this worker's rank is 1 and entry 1 of",
            id="own-endpoint-not-listed",
        ),
        pytest.param(
            WORKER | {"PADDLE_CURRENT_ENDPOINT": "10.0.0.1:6175"},
            "is '10.0.0.2:6175'; expected",
            id="another-s",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'", id="world-size"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2'; expected", id="torchrun-rank"),
    ],
)
def test_a_mistake_in_collective_mode_is_named(environ, message):
    with pytest.raises(RoleError, match=re.escape(message)):
        role(environ, is_collective=True)


NAMES = sorted(
    {*TRAINER, *SERVER, *QUICK_TRAINER, *QUICK_SERVER, *WORKER, *AGENT, "NODE_RANK", "PADDLE_PSERVER_ID"}
)
VALUES = sorted({*TRAINER.values(), *SERVER.values(), *QUICK_SERVER.values(), *WORKER.values(), "", "0"})


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(max_size=12)),
    st.booleans(),
)
def test_any_environment_gives_a_consistent_role_or_a_role_error(environ, is_collective):
    try:
        made = role(environ, is_collective=is_collective)
    except RoleError as error:
        assert any(name in str(error) for name in NAMES)  # noqa: PT017 - whether it fails depends on the draw
        return
    count = made.worker_num if made.kind is RoleKind.WORKER else made.server_num
    assert 0 <= made.index < count
    if made.kind is RoleKind.SERVER:
        assert made.server_endpoints[made.index] == made.current_endpoint
    assert made.is_collective is is_collective


def test_the_process_s_own_environment_is_read_when_none_is_given(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in TRAINER.items():
        monkeypatch.setenv(name, value)
    maker = PaddleCloudRoleMaker()
    assert maker.is_worker()
    assert (maker.is_server(), maker.is_first_worker()) == (False, False)
    assert (maker.worker_index(), maker.worker_num(), maker.server_num()) == (1, 3, 2)
    assert (maker.get_pserver_endpoints(), maker.get_trainer_endpoints()) == ([ONE, TWO], [])


def test_a_server_answers_for_itself():
    maker = PaddleCloudRoleMaker()
    made = maker.generate_role(SERVER)
    assert maker.role is made
    assert (maker.is_server(), maker.server_index()) == (True, 1)


@pytest.mark.parametrize("is_collective", [False, True])
@pytest.mark.parametrize("environ", [{}, {"POD_IP": "10.0.0.7", "FLEET_CHECKPOINT_DIR": "/data"}])
def test_without_any_variable_of_a_job_a_process_is_alone(environ, is_collective):
    found = role(environ, is_collective=is_collective)
    assert found.is_alone
    assert (found.is_worker, found.index, found.worker_num) == (True, 0, 1)
    assert found.server_num == (0 if is_collective else 1)


@pytest.mark.parametrize("name", sorted(TRAINER.keys() | WORKER.keys() - {"POD_IP"}))
def test_any_variable_of_a_job_means_one(name):
    environ = (WORKER | TRAINER)[name]
    with pytest.raises(RoleError, match="is not set"):
        role({name: environ})
