"""The distribute transpiler: from one captured program to the programs of every replica of a job."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import TranspileError
from fleet.fluid.clipping import check_clipping
from fleet.fluid.collective_program import COLLECTIVE_MODES, build_collective, refuse_argument
from fleet.fluid.layout import Layout, lay_out
from fleet.fluid.program import Program, default_main_program, default_startup_program
from fleet.fluid.pserver_program import build_pserver_program, build_pserver_startup
from fleet.fluid.trainer_program import build_trainer_program, rewrite_startup
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.plan.source import refuse_forward_writes

__all__ = ["DistributeTranspiler"]

_ENDPOINT: Final = "127.0.0.1:6174"


class DistributeTranspiler:
    """Distribute a program over parameter servers.

    Parameters
    ----------
    config : DistributeTranspilerConfig, optional
        The defaults otherwise.
    mode : TrainingMode, optional
        A mode of your own, which then decides instead of the config; see `fleet.parameter_server.modes`.

    Notes
    -----
    The original's ``fluid.transpiler.DistributeTranspiler``.

    Examples
    --------
    On every replica alike::

        transpiler = fleet.DistributeTranspiler()
        transpiler.transpile(trainer_id, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=2)

    then ``get_pserver_program(endpoint)`` on a server, ``get_trainer_program()`` on a trainer.
    """

    def __init__(
        self, config: DistributeTranspilerConfig | None = None, *, mode: TrainingMode | None = None
    ) -> None:
        self.config = config if config is not None else DistributeTranspilerConfig()
        self._mode = mode
        self._layout: Layout | None = None
        self._main = Program()
        self._startup = Program()
        self._trainer_program = Program()
        self._wait_port = True

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str | Iterable[str] = _ENDPOINT,
        trainers: int | str | Iterable[str] = 1,
        sync_mode: bool = True,
        startup_program: Program | None = None,
        current_endpoint: str = _ENDPOINT,
    ) -> None:
        """Work out every replica's programs; the `get_` methods then return them in any order.

        Parameters
        ----------
        trainer_id : int
            This trainer's number, from 0. Any valid number on a parameter server.
        program : Program, optional
            The captured program; `fleet.default_main_program()` otherwise. It stays as it is, but cannot
            be transpiled again.
        pservers : str or iterable of str
            The parameter servers' endpoints, ``host:port``, comma separated; none where `config.mode` is
            ``nccl2`` or ``collective``.
        trainers : int, str or iterable of str
            Number of trainers; their endpoints where `config.mode` is ``nccl2`` or ``collective``.
        sync_mode : bool
            False for asynchronous training, which the config can ask for too. Collective training has none.
        startup_program : Program, optional
            The startup program of `program`; its own otherwise. Rewritten in place into the trainer's.
        current_endpoint : str
            This trainer's, where `config.mode` is ``nccl2`` or ``collective``.

        Raises
        ------
        TranspileError
            Any argument or config field that cannot be honoured; nothing has changed then.
        """
        main = program if program is not None else default_main_program()
        startup = _startup_of(main, program, startup_program)
        _check_untouched(main, startup)
        if self.config.mode in COLLECTIVE_MODES:
            given = _for_servers(self._mode, sync_mode, pservers)
            self._transpile_collective(main, startup, trainer_id, trainers, current_endpoint, given)
            return
        self.config.check()
        mode = self._programs_of(sync_mode)
        _check_trained(main, mode, self._mode)
        number = _checked_trainers(trainer_id, trainers)
        config = replace(self.config)
        layout = lay_out(main, config, mode, _checked_servers(pservers), number, self._mode)
        trainer_program = build_trainer_program(main, layout, trainer_id)
        self._layout, self._main, self._startup = layout, main.clone(), startup.clone()
        self._trainer_program = trainer_program
        rewrite_startup(startup, layout, trainer_id)
        self._wait_port = startup.attrs["wait_port"] = config.wait_port
        trainer_program.startup_program = startup
        main.attrs["transpiled"] = True
        if config.print_log:
            _print_layout(layout)

    def _transpile_collective(
        self,
        main: Program,
        startup: Program,
        trainer_id: int,
        trainers: int | str | Iterable[str],
        current_endpoint: str,
        given: Iterable[tuple[str, object, object]],
    ) -> None:
        self._trainer_program = build_collective(
            main, startup, self.config, trainer_id, trainers, current_endpoint, given
        )
        main.attrs |= {name: startup.attrs[name] for name in ("trainers", "trainer_id")}
        main.attrs["transpiled"] = True

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """Return what this trainer runs at each step.

        Parameters
        ----------
        wait_port : bool
            Wait for the servers' ports before the first step. `config.wait_port` must agree. It holds for
            the startup program too. Collective training has no such ports.

        Returns
        -------
        Program
            The same object at every call.

        Raises
        ------
        TranspileError
            `transpile` has not been called; or there are no ports, and they are not to be waited for.
        """
        if "role" not in self._trainer_program.attrs:
            self._transpiled()
        if self._trainer_program.attrs["role"] == "collective":
            refuse_argument("get_trainer_program.wait_port", wait_port, True)
        waits = bool(wait_port and self._wait_port)
        for program in (self._trainer_program, self._trainer_program.startup_program):
            if program is not None:
                program.attrs["wait_port"] = waits
        return self._trainer_program

    def get_pserver_program(self, endpoint: str) -> Program:
        """Return what the parameter server at `endpoint` runs.

        Parameters
        ----------
        endpoint : str
            One of transpile's `pservers`.

        Returns
        -------
        Program

        Raises
        ------
        TranspileError
            `transpile` has not been called, the endpoint is not among its servers, or training is collective.
        """
        return self.get_pserver_programs(endpoint)[0]

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """Return `get_pserver_program` and `get_startup_program` of one endpoint.

        Parameters
        ----------
        endpoint : str
            One of the servers that `transpile` was given, as host:port.

        Returns
        -------
        tuple of two Program
            What the server serves, and what prepares it.

        Raises
        ------
        TranspileError
            There is no such server, or ``transpile`` was not called.
        """
        layout = self._layout_with(endpoint)
        program = build_pserver_program(self._main, layout, endpoint)
        startup = build_pserver_startup(self._startup, self._main, layout, endpoint)
        program.startup_program = startup
        return program, startup

    def get_startup_program(
        self,
        endpoint: str,
        pserver_program: Program | None = None,
        startup_program: Program | None = None,
    ) -> Program:
        """Return the program that creates what the parameter server at `endpoint` holds.

        Parameters
        ----------
        endpoint : str
            One of transpile's `pservers`.
        pserver_program, startup_program : Program, optional
            Deprecated, as in the original: transpile knows both. What is given must be this endpoint's
            pserver program, and the startup program that was transpiled.

        Returns
        -------
        Program

        Raises
        ------
        TranspileError
            `transpile` has not been called, the endpoint is not among its servers, training is collective, or
            one of the deprecated arguments is another program than the one that is used.
        """
        layout = self._layout_with(endpoint)
        given = {"pserver_program": pserver_program, "startup_program": startup_program}
        if named := " and ".join(name for name, program in given.items() if program is not None):
            warnings.warn(
                f"get_startup_program: {named} is not needed, transpile() knows it; leave it out",
                DeprecationWarning,
                stacklevel=2,
            )
        if pserver_program is not None and pserver_program.attrs.get("endpoint") != endpoint:
            raise TranspileError(
                f"pserver_program belongs to {pserver_program.attrs.get('endpoint')!r}, not to {endpoint!r}; "
                "pass what get_pserver_program returned for this endpoint, or leave it out"
            )
        if startup_program not in (None, self._startup, self._trainer_program.startup_program):
            raise TranspileError(
                "startup_program is not the one that was transpiled; pass that one, or leave it out"
            )
        return build_pserver_startup(self._startup, self._main, layout, endpoint)

    def _programs_of(self, sync_mode: bool) -> DistributedMode:
        if self._mode is None:
            return self.config.distributed_mode(sync_mode)
        self.config.check_options(self._mode.programs, custom=True)
        return self._mode.programs

    def _transpiled(self) -> Layout:
        if self._trainer_program.attrs.get("role") == "collective":
            raise TranspileError(
                f"config.mode is {self.config.mode!r}, in which there are no parameter servers: each trainer "
                "runs get_trainer_program(), and before it the startup program that transpile() was given, "
                "which is get_trainer_program().startup_program"
            )
        if self._layout is None:
            raise TranspileError("there is no program yet: call transpile() first")
        return self._layout

    def _layout_with(self, endpoint: str) -> Layout:
        layout = self._transpiled()
        if endpoint not in layout.endpoints:
            raise TranspileError(
                f"endpoint {endpoint!r} is not a parameter server; "
                f"expected one of {', '.join(layout.endpoints)}"
            )
        return layout


def _for_servers(
    mode: object, sync_mode: bool, pservers: str | Iterable[str]
) -> list[tuple[str, object, object]]:
    """Return what only servers give a meaning: name in `fleet.options`, value, default."""
    return [
        ("DistributeTranspiler.mode", mode, None),
        ("transpile.sync_mode", sync_mode, True),
        ("transpile.pservers", ",".join(split_endpoints(pservers)) or _ENDPOINT, _ENDPOINT),
    ]


def _startup_of(main: Program, given: Program | None, startup: Program | None) -> Program:
    if startup is not None:
        return startup
    if given is not None and main.startup_program is not None:
        return main.startup_program
    return default_startup_program()


def _checked_servers(pservers: str | Iterable[str]) -> list[str]:
    """Return the servers' endpoints; TranspileError for those that nobody could reach."""
    endpoints = split_endpoints(pservers)
    if (problem := endpoints_problem(endpoints)) is not None:
        raise TranspileError(
            f"pservers is {pservers!r}: {problem}; expected host:port, comma separated, each server once"
        )
    return endpoints


def _check_untouched(main: Program, startup: Program) -> None:
    if "transpiled" in main.attrs or "role" in main.attrs:
        raise TranspileError(
            "program has been transpiled already; capture it anew, or transpile a clone taken before"
        )
    if "role" in startup.attrs:
        raise TranspileError(
            "startup_program has been transpiled already; capture anew, or pass the startup program of a "
            "clone taken before"
        )


def _check_trained(main: Program, mode: DistributedMode, own: TrainingMode | None) -> None:
    check_clipping(main, mode, own)
    if own is None:
        refuse_forward_writes(main.source, steps_alone=mode is DistributedMode.GEO)


def _checked_trainers(trainer_id: object, trainers: object) -> int:
    if isinstance(trainers, str):
        raise TranspileError(
            f"trainers is the text {trainers!r}; expected the number of trainers. A list of endpoints "
            "belongs to collective training: set config.mode = 'nccl2' or 'collective'"
        )
    if isinstance(trainers, bool) or not isinstance(trainers, int) or trainers < 1:
        raise TranspileError(f"trainers is {trainers!r}; expected a whole number of at least 1")
    if isinstance(trainer_id, bool) or not isinstance(trainer_id, int) or not 0 <= trainer_id < trainers:
        raise TranspileError(
            f"trainer_id is {trainer_id!r}; expected a whole number from 0 to {trainers - 1}"
        )
    return trainers


def _print_layout(layout: Layout) -> None:
    """Print one line per block, and the share of each server, as the original does."""
    for block in layout.blocks:
        shape = list(block.shape)
        print(f"{block.name} {shape} elements {block.begin} to {block.end} on {block.endpoint}")
    for endpoint in layout.endpoints:
        held = layout.on(endpoint)
        elements = sum(block.end - block.begin for block in held)
        print(f"{endpoint} holds {len(held)} blocks, {elements} elements", flush=True)
