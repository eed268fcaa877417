"""The key of a job: what its replicas have in common and a stranger on the network has not."""

from pathlib import Path
from typing import Final

from fleet.errors import RoleError
from fleet.role_maker.variables import Variables

__all__ = ["KEY_BYTES", "key_of"]

KEY_BYTES: Final = 32
_EXPECTED: Final = f"{2 * KEY_BYTES} hexadecimal digits, as `openssl rand -hex {KEY_BYTES}` prints them"


def key_of(variables: Variables) -> bytes:
    """Read the key: ``FLEET_JOB_KEY``, else the file that ``FLEET_JOB_KEY_FILE`` names.

    Returns
    -------
    bytes
        256 bits; none where neither is set.

    Raises
    ------
    RoleError
        It is no key, or the file cannot be read; the message names the variable and never the value.
    """
    name, text = "FLEET_JOB_KEY", variables.optional("FLEET_JOB_KEY")
    if not text and (path := variables.optional("FLEET_JOB_KEY_FILE")):
        name = f"the file {path} (FLEET_JOB_KEY_FILE)"
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise RoleError(f"{name} cannot be read: {reason}; expected {_EXPECTED}") from error
    elif not text:
        return b""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise RoleError(f"{name} has {len(text)} characters; expected {_EXPECTED}")
    return key
