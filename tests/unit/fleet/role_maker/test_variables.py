"""The key of a job as a replica is given it: by the environment, or by a file."""

from pathlib import Path

import pytest

from fleet.errors import RoleError
from fleet.role_maker.variables import Variables, key_of

KEY = "0123456789abcdef" * 4


def test_a_replica_that_is_given_none_has_none():
    assert key_of(Variables({"FLEET_JOB_KEY": " "})) == b""


def test_the_environment_gives_it():
    assert key_of(Variables({"FLEET_JOB_KEY": KEY})).hex() == KEY


def test_a_mounted_file_gives_it(tmp_path: Path):
    (tmp_path / "key").write_text(KEY + "\n")
    assert key_of(Variables({"FLEET_JOB_KEY_FILE": str(tmp_path / "key")})).hex() == KEY


@pytest.mark.parametrize("text", ["secret", KEY[:-2], KEY + "00", KEY[:-1] + "g"])
def test_what_is_no_key_is_refused_and_not_repeated(text: str, tmp_path: Path):
    (tmp_path / "key").write_text(text)
    for environ in ({"FLEET_JOB_KEY": text}, {"FLEET_JOB_KEY_FILE": str(tmp_path / "key")}):
        with pytest.raises(RoleError, match=r"FLEET_JOB_KEY.* expected 64 hexadecimal digits") as raised:
            key_of(Variables(environ))
        assert text not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(RoleError, match=r"missing \(FLEET_JOB_KEY_FILE\) cannot be read: No such file"):
        key_of(Variables({"FLEET_JOB_KEY_FILE": str(tmp_path / "missing")}))
