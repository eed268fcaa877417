"""The cases of the network benchmark, and the minimum time of a step on their links."""

import re
from dataclasses import dataclass

from benchmarks.network import MAX_HOSTS
from benchmarks.workload import MAX_BATCH

__all__ = ["Case", "limit_seconds", "memory_bytes", "parse_cases"]

PATTERN = re.compile(r"(\d+)\+(\d+)@(\d+)(?:x(\d+))?")
HALVED = ("bf16", "ddphalf", "allreducehalf")
"""The systems that send bfloat16."""
ALL_REDUCES = ("ddp", "ddphalf", "allreduce", "allreducehalf", "localsgd")
EVERY_EIGHTH = ("localsgd",)
"""The systems that communicate only after every eighth step."""
PROCESS_BYTES = 250_000_000
"""The memory of a process without parameters."""


@dataclass(frozen=True)
class Case:
    """A case: numbers of trainers and servers, link rate, and batch size."""

    num_trainers: int
    num_servers: int
    mbit_per_second: int
    batch: int = 1

    def __str__(self) -> str:
        size = f"x{self.batch}" if self.batch != 1 else ""
        return f"{self.num_trainers}+{self.num_servers}@{self.mbit_per_second}{size}"


def parse_cases(text: str) -> list[Case]:
    """Parse cases such as ``4+4@400,4+4@1000x64``: trainers+servers@Mbit/s, and optionally xBATCH_SIZE.

    Raises
    ------
    ValueError
        A case is malformed, cannot be measured, or occurs twice.
    """
    cases = [_case(part) for part in text.split(",")]
    if len(set(cases)) != len(cases):
        raise ValueError(f"{text!r} has a case twice; expected each once")
    return cases


def _case(text: str) -> Case:
    if (found := PATTERN.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no case; expected trainers+servers@Mbit/s, as 4+4@400, or 4+4@400x64")
    case = Case(*(int(number) for number in found.groups(default="1")))
    if case.num_trainers < 2 or case.num_servers < 1 or case.num_trainers + case.num_servers > MAX_HOSTS:
        raise ValueError(f"{text!r}: expected 2 trainers or more and 1 server or more, {MAX_HOSTS} in all")
    if case.mbit_per_second < 1 or not 1 <= case.batch <= MAX_BATCH:
        raise ValueError(f"{text!r}: expected 1 Mbit/s or more, and batches of 1 to {MAX_BATCH}")
    return case


def limit_seconds(system: str, case: Case, parameter_bytes: int) -> float:
    """Return the time that the busiest link needs for one step's payload.

    Parameters
    ----------
    system : str
        One of `benchmarks.systems.SYSTEMS`. Without communication the limit is 0.
    case : Case
    parameter_bytes : int
        The size M of the model. Every trainer sends M to the servers and receives M from them, at the same
        time over a full-duplex link; a server receives and sends its part of M for every trainer. In a ring
        of N trainers, each one sends 2 (N - 1) / N x M.
    """
    if system == "compute":
        return 0.0
    carried = parameter_bytes / 2 if system in HALVED else float(parameter_bytes)
    if system in ALL_REDUCES:
        carried *= 2 * (case.num_trainers - 1) / case.num_trainers / (8 if system in EVERY_EIGHTH else 1)
    else:
        carried *= max(1.0, case.num_trainers / case.num_servers)
    return carried * 8 / (case.mbit_per_second * 1e6)


def memory_bytes(system: str, case: Case, parameter_bytes: int) -> int:
    """Estimate the memory that a system's processes need, with a safety margin.

    Parameters
    ----------
    system, case, parameter_bytes
        As in `limit_seconds`.
    """
    if system == "compute" or system in ALL_REDUCES:
        return round(case.num_trainers * (PROCESS_BYTES + 3.5 * parameter_bytes))
    slices_per_server = (case.num_trainers + 2) / case.num_servers
    servers = case.num_servers * (PROCESS_BYTES + (1 + slices_per_server) * parameter_bytes)
    return round(servers + case.num_trainers * (PROCESS_BYTES + 5.5 * parameter_bytes))
