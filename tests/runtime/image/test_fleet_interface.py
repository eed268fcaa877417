"""The network interface of scripts that know nothing of `fleet`, under the trainer image's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path("tools/image").absolute()
IPV6 = Path("/proc/net/if_inet6")
KNOWN = IPV6.read_text() if IPV6.exists() else ""
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SCRIPT = f"""
import site; site.addpackage({str(TOOLS)!r}, "fleet_interface.pth", None)
import json, os, sys
assert not {{"fleet", "torch"}} & sys.modules.keys()
print(json.dumps({{name: os.environ[name] for name in {NAMES} if name in os.environ}}))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the image has Linux")


def chosen(**environ: str) -> dict[str, str]:
    """Return what a script finds in its environment when the hook has run in its interpreter."""
    plain = {name: value for name, value in os.environ.items() if name not in NAMES}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**plain, "PYTHONPATH": str(TOOLS), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not ended.stderr
    found: dict[str, str] = json.loads(ended.stdout)
    return found


def test_gloo_and_nccl_use_the_interface_of_the_pods_address():
    assert chosen(FLEET_POD_IP="127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.skipif(" lo\n" not in KNOWN, reason="this machine has no IPv6")
def test_an_address_may_be_of_ipv6():
    assert chosen(FLEET_POD_IP="::1")["GLOO_SOCKET_IFNAME"] == "lo"


def test_what_the_template_names_stays():
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert chosen(FLEET_POD_IP="127.0.0.1", **environ) == {"GLOO_SOCKET_IFNAME": "lo", **environ}


@pytest.mark.parametrize("address", ["", "192.0.2.1", "2001:db8::1", "nobody", "::nobody"])
def test_they_choose_themselves_where_no_interface_has_the_address(address):
    assert chosen(FLEET_POD_IP=address) == {}


def test_nothing_is_chosen_where_pods_have_a_network_of_their_own():
    assert chosen() == {}
