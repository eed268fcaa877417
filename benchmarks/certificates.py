"""TLS certificates for benchmarks of encrypted systems."""

import atexit
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["environment"]

_NAME = "benchmark"


def environment() -> dict[str, str]:
    """Create a certificate in a new folder; return the environment variables that make replicas use it."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-benchmark-tls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "1", "-subj", f"/CN={_NAME}", "-addext", f"subjectAltName=DNS:{_NAME}"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    return {"FLEET_TLS_DIR": str(folder), "FLEET_TLS_SERVER_NAME": _NAME}
