"""Names of everything a job owns."""

import re

from fleet_operator.api import Role
from fleet_operator.api.base import MAX_LISTED, MAX_TRAINERS
from fleet_operator.api.names import MAX_NAME_LENGTH, cluster_host, pod_name, service_name

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def test_names_of_the_longest_job_are_dns_labels():
    longest = "d" * MAX_NAME_LENGTH
    for role in Role:
        name = pod_name(longest, role, MAX_TRAINERS - 1)
        assert len(name) <= 63
        assert DNS_LABEL.fullmatch(name)
    assert DNS_LABEL.fullmatch(service_name(longest))


def test_a_host_is_the_pod_in_the_service_in_the_namespace():
    assert cluster_host("digits", "vision", Role.PSERVER, 1) == "digits-pserver-1.digits.vision.svc"


def test_the_longest_list_of_hosts_fits_one_variable():
    """Linux takes at most 128 KiB in one variable of the environment, its name included."""
    entry = f"{cluster_host('d' * MAX_NAME_LENGTH, 'n' * 63, Role.TRAINER, MAX_LISTED - 1)}:65535,"
    assert len(entry) * MAX_LISTED + len("PADDLE_PSERVERS_IP_PORT_LIST=") < 128 * 1024
