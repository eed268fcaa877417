"""The distribute transpiler, which converts one program to the programs of all replicas."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import TranspileError
from fleet.fluid.collective_program import (
    COLLECTIVE_MODES,
    collective_program,
    collective_startup,
    plan_collective,
    refuse_argument,
)
from fleet.fluid.program import Program, default_main_program, default_startup_program
from fleet.fluid.program import startup_program as captured_startup
from fleet.fluid.render import check_unedited, render_pserver, render_trainer
from fleet.plan.config import DistributedMode, DistributeTranspilerConfig, TrainingMode
from fleet.plan.job import CollectivePlan, JobPlan, plan_job
from fleet.plan.spec import TrainingSpec

if TYPE_CHECKING:
    from fleet.plan.source import Source

__all__ = ["DistributeTranspiler"]

_ENDPOINT: Final = "127.0.0.1:6174"


class DistributeTranspiler:
    """Converts a program to the programs of trainers and servers, or of collective trainers.

    Parameters
    ----------
    config : DistributeTranspilerConfig, optional
        By default a config with default values.
    mode : TrainingMode, optional
        A user-defined mode, which takes precedence over the config; see `fleet.parameter_server.modes`.

    Notes
    -----
    Paddle's ``fluid.transpiler.DistributeTranspiler``.

    Examples
    --------
    On every replica::

        transpiler = fleet.DistributeTranspiler()
        transpiler.transpile(trainer_id, pservers="10.0.0.1:6174,10.0.0.2:6174", trainers=2)

    then ``get_pserver_program(endpoint)`` on a server, ``get_trainer_program()`` on a trainer.
    """

    def __init__(
        self, config: DistributeTranspilerConfig | None = None, *, mode: TrainingMode | None = None
    ) -> None:
        self.config = config if config is not None else DistributeTranspilerConfig()
        self._mode = mode
        self._plan: JobPlan | CollectivePlan | None = None
        self._source: Source | None = None
        self._origin: Program | None = None
        self._trainer_program = Program()

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
        """Plan the job; afterwards, the `get_` methods return the programs of the replicas.

        Parameters
        ----------
        trainer_id : int
            This trainer's index, from 0. On a parameter server, any valid index.
        program : Program, optional
            By default `fleet.default_main_program()`. A captured program is not changed, but cannot be
            transpiled again. A program that was built with layers becomes the trainer's, as in Paddle.
        pservers : str or iterable of str
            The endpoints of the parameter servers, ``host:port``, as a list or comma separated; empty if
            `config.mode` is ``nccl2`` or ``collective``.
        trainers : int, str or iterable of str
            The number of trainers, or their endpoints if `config.mode` is ``nccl2`` or ``collective``.
        sync_mode : bool
            False for asynchronous training, which the config can request as well. Collective training accepts
            only True.
        startup_program : Program, optional
            The startup program of `program`; by default the one that `program` has. It is rewritten in place
            into the trainer's startup program.
        current_endpoint : str
            This trainer's endpoint, if `config.mode` is ``nccl2`` or ``collective``.

        Raises
        ------
        TranspileError
            An argument or a config field is invalid or not supported. No program is changed in this case.
        """
        main = program if program is not None else default_main_program()
        startup = _startup_of(main, program, startup_program)
        collective = self.config.mode in COLLECTIVE_MODES
        if not collective:  # before the variables of a program built with layers are bound to parameters
            servers, count = _checked_servers(pservers), _checked_trainers(trainer_id, trainers)
        built = main.training is not None
        bound = self._bound(main, startup, sync_mode) if built else main
        spec = _spec_of(bound, startup)
        if collective:
            given = _for_servers(self._mode, sync_mode, pservers)
            plan = plan_collective(spec, self.config, trainer_id, trainers, current_endpoint, given)
            self._origin = bound if built else None
            prepared = collective_program(plan, self._origin), collective_startup(plan, self._origin)
            self._plan = plan
        else:
            job = plan_job(
                spec,
                bound.source,
                self.config,
                servers,
                count,
                sync_mode=sync_mode,
                custom=self._mode,
                seed=main.random_seed if built else None,
            )
            self._origin = bound if built else None
            prepared = render_trainer(job, trainer_id, self._origin)
            self._plan = job
        # As in Paddle, the startup program that the script holds becomes the trainer's.
        trained, self._source = main if built else Program(), bound.source
        for rewritten, made in zip((trained, startup), prepared, strict=True):
            rewritten.blocks, rewritten.attrs, rewritten.plan = made.blocks, made.attrs, self._plan
            rewritten.origin, rewritten.source, rewritten.mode = self._origin, self._source, self._mode
            for block in rewritten.blocks:
                block.program = rewritten
        startup.part = "startup"  # it may have been a new, empty program
        trained.startup_program, self._trainer_program = startup, trained
        if not built:
            main.attrs["transpiled"] = True
            if collective:
                main.attrs |= {"trainers": len(plan.endpoints), "trainer_id": trainer_id}

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """Return the program that this trainer runs in each step.

        Parameters
        ----------
        wait_port : bool
            Whether to wait for the servers' ports before the first step, in the startup program too.
            `config.wait_port` must agree. Collective training has no such ports.

        Returns
        -------
        Program
            The same object in every call.

        Raises
        ------
        TranspileError
            `transpile` has not been called; or training is collective, and `wait_port` is False.
        """
        if isinstance(self._plan, CollectivePlan):
            refuse_argument("get_trainer_program.wait_port", wait_port, True)
            waits = True
        else:
            waits = bool(wait_port and self._job_plan().wait_port)
        for program in (self._trainer_program, self._trainer_program.startup_program):
            if program is not None:
                program.attrs["wait_port"] = waits
        return self._trainer_program

    def get_pserver_program(self, endpoint: str) -> Program:
        """Return the main program of the parameter server at `endpoint`.

        Parameters
        ----------
        endpoint : str
            One of the `pservers` that were passed to ``transpile``.

        Returns
        -------
        Program

        Raises
        ------
        TranspileError
            `transpile` has not been called, the endpoint is not one of the servers, or training is
            collective.
        """
        return self.get_pserver_programs(endpoint)[0]

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """Return the main and the startup program of the server at `endpoint`.

        Parameters
        ----------
        endpoint : str
            One of the servers that were passed to ``transpile``, as host:port.

        Returns
        -------
        tuple of two Program
            The program that the server runs, and its startup program.

        Raises
        ------
        TranspileError
            There is no such server, or ``transpile`` has not been called.
        """
        plan = self._plan_with(endpoint)
        program, startup = render_pserver(plan, endpoint, self._origin)
        for each in (program, startup):
            each.source, each.mode, each.origin = self._source, self._mode, self._origin
        program.startup_program = startup
        return program, startup

    def get_startup_program(
        self,
        endpoint: str,
        pserver_program: Program | None = None,
        startup_program: Program | None = None,
    ) -> Program:
        """Return the startup program of the server at `endpoint`.

        Parameters
        ----------
        endpoint : str
            One of the `pservers` that were passed to ``transpile``.
        pserver_program, startup_program : Program, optional
            Deprecated, as in Paddle, because the transpiler knows both. If given, they must be the
            pserver program of this endpoint and the startup program that was transpiled.

        Returns
        -------
        Program

        Raises
        ------
        TranspileError
            `transpile` has not been called, the endpoint is not one of the servers, training is collective,
            or a deprecated argument is not the program that is used.
        """
        self._plan_with(endpoint)
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
        known = (None, self._trainer_program.startup_program, captured_startup(self._job_plan().spec))
        if startup_program not in known and self._origin is None:
            raise TranspileError(
                "startup_program is not the one that was transpiled; pass that one, or leave it out"
            )
        return self.get_pserver_programs(endpoint)[1]

    @property
    def plan(self) -> JobPlan | CollectivePlan:
        """The plan that `transpile` made for the job.

        Raises
        ------
        TranspileError
            ``transpile`` has not been called.
        """
        if self._plan is None:
            raise TranspileError("there is no program yet: call transpile() first")
        return self._plan

    def _bound(self, main: Program, startup: Program, sync_mode: bool) -> Program:
        """Return a copy of a built program, bound to the PyTorch objects that train it."""
        from fleet.fluid.module import bind  # imported here, because captured programs need no torch
        from fleet.fluid.scope import global_scope

        _refuse_transpiled(main, startup)
        averages = True
        if self.config.mode not in COLLECTIVE_MODES:
            self.config.check()
            mode = self.config.distributed_mode(sync_mode) if self._mode is None else None
            averages = mode is DistributedMode.SYNC
        origin = main.clone()
        origin.startup_program = startup.clone()
        bind(origin, global_scope(), self.config, averages=averages)
        return origin

    def _job_plan(self) -> JobPlan:
        plan = self.plan
        if isinstance(plan, CollectivePlan):
            raise TranspileError(
                f"config.mode is {self.config.mode!r}, in which there are no parameter servers: each trainer "
                "runs get_trainer_program(), and before it the startup program that transpile() was given, "
                "which is get_trainer_program().startup_program"
            )
        return plan

    def _plan_with(self, endpoint: str) -> JobPlan:
        plan = self._job_plan()
        if endpoint not in plan.endpoints:
            raise TranspileError(
                f"endpoint {endpoint!r} is not a parameter server; "
                f"expected one of {', '.join(plan.endpoints)}"
            )
        return plan


def _for_servers(
    mode: object, sync_mode: bool, pservers: str | Iterable[str]
) -> list[tuple[str, object, object]]:
    """Return the arguments that concern only servers, each as an option's name, value and default."""
    return [
        ("DistributeTranspiler.mode", mode, None),
        ("transpile.sync_mode", sync_mode, True),
        ("transpile.pservers", ",".join(split_endpoints(pservers)) or _ENDPOINT, _ENDPOINT),
    ]


def _startup_of(main: Program, given: Program | None, startup: Program | None) -> Program:
    if startup is not None:
        return startup
    if (given is not None or main.training is not None) and main.startup_program is not None:
        return main.startup_program
    return default_startup_program()


def _refuse_transpiled(main: Program, startup: Program) -> None:
    if "transpiled" in main.attrs or "role" in main.attrs:
        raise TranspileError(
            "program has been transpiled already; capture or build another, or transpile a clone taken before"
        )
    if "role" in startup.attrs:
        raise TranspileError(
            "startup_program has been transpiled already; capture another program, or pass the startup "
            "program of a clone taken before"
        )


def _checked_servers(pservers: str | Iterable[str]) -> list[str]:
    """Return the servers' endpoints; raise TranspileError for a malformed or duplicate one."""
    endpoints = split_endpoints(pservers)
    if (problem := endpoints_problem(endpoints)) is not None:
        raise TranspileError(
            f"pservers is {pservers!r}: {problem}; expected host:port, comma separated, each server once"
        )
    return endpoints


def _spec_of(main: Program, startup: Program) -> TrainingSpec:
    """Return the specification of a captured program; reject a transpiled or edited one."""
    _refuse_transpiled(main, startup)
    if not isinstance(main.plan, TrainingSpec):
        raise TranspileError(
            "no optimizer: the program has no plan of what it trains; expected one that was made with "
            "Program.capture(model, loss_fn, optimizer), or built with layers and minimized: operators that "
            "are appended by hand are not run"
        )
    if main.training is not None:
        return main.plan
    check_unedited(main)
    if startup.plan is not None:
        check_unedited(startup)
    if startup.plan not in (main.plan, None) or (startup.plan is None and startup != Program()):
        raise TranspileError("startup_program is not that of the program; leave it out, or pass that one")
    return main.plan


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
