import pytest

from fleet import errors


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.FleetError, 1),
        (errors.ConfigurationError, 2),
        (errors.RoleError, 2),
        (errors.TranspileError, 2),
        (errors.RemoteProtocolError, 1),
        (errors.LocalProtocolError, 1),
        (errors.StateLostError, 90),
        (errors.PeerLostError, 91),
        (errors.DeadlineExceededError, 91),
    ],
)
def test_each_error_ends_a_replica_with_the_contract_s_status(error, exit_code):
    assert issubclass(error, errors.FleetError)
    assert error.exit_code == exit_code


def test_the_tree():
    assert issubclass(errors.RoleError, errors.ConfigurationError)
    assert issubclass(errors.TranspileError, errors.ConfigurationError)
    assert issubclass(errors.RemoteProtocolError, errors.ProtocolError)
    assert issubclass(errors.LocalProtocolError, errors.ProtocolError)
    assert issubclass(errors.DeadlineExceededError, errors.PeerLostError)
