"""The training sessions of this process, looked up by the PyTorch objects that they train.

An `Executor` that runs a program and a loop that calls ``optimizer.step()`` share one session: either finds
the session that the other started.
"""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial
from typing import Final

from fleet.checkpoint import CHECKPOINT_PREFIX, MANIFEST_NAME, end_if_finished, leave_mark
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.parameter_server.facts import state_of
from fleet.parameter_server.pieces import in_pieces
from fleet.parameter_server.server.server import Server
from fleet.parameter_server.settings import THREAD_NUMS, Settings
from fleet.parameter_server.shard import release
from fleet.parameter_server.trainer.parameters import check_dtype
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.parameter_server.transport.arena import dtype_of
from fleet.plan import ServerPlan, Source, TrainerPlan
from fleet.process import lifecycle, progress
from fleet.process.resources import keep_freed_memory
from fleet.role_maker import JobIdentity, Role, RoleKind
from fleet.role_maker.variables import SYNC_MODES, Variables, sync_mode_of
from fleet.strategy import DistributedStrategy

__all__ = [
    "complete",
    "find_trainer",
    "serve",
    "serves_within",
    "start_server",
    "start_trainer",
    "train_as",
]

_log = logging.getLogger(__name__)
_DEFAULTS: Final = DistributedStrategy()
_END_SECONDS: Final = 5.0
_choices: "weakref.WeakKeyDictionary[Source, tuple[DistributedStrategy, ServerPlan | None]]" = (
    weakref.WeakKeyDictionary()
)
"""By source: the strategy of its session, and the plan of the server in this process, or None."""
_trainers: "weakref.WeakKeyDictionary[Source, Trainer]" = weakref.WeakKeyDictionary()
_threads_within: "weakref.WeakKeyDictionary[Trainer, threading.Thread]" = weakref.WeakKeyDictionary()
"""For each trainer that trains alone, the thread of the server inside this process."""


def find_trainer(source: Source) -> Trainer | None:
    """Return the trainer of the given PyTorch objects, or None if there is none."""
    return _trainers.get(source)


def train_as(source: Source, strategy: DistributedStrategy, server_within: ServerPlan | None = None) -> None:
    """Set the strategy of the session that will train the given PyTorch objects.

    Parameters
    ----------
    source : Source
    strategy : DistributedStrategy
    server_within : ServerPlan, optional
        The server that the trainer's session starts inside this process, which trains alone.
    """
    _choices[source] = strategy, server_within


def serves_within(source: Source) -> bool:
    """Return whether the session of these PyTorch objects starts a server in the trainer's process."""
    return source in _choices and _choices[source][1] is not None


def start_trainer(plan: TrainerPlan, source: Source, job: JobIdentity) -> Trainer:
    """Start a trainer: join the servers in a plan and load their values.

    Parameters
    ----------
    plan : TrainerPlan
    source : Source
        The module and the optimizer from which the plan was made.
    job : JobIdentity

    Raises
    ------
    ConfigurationError
        A session already exists, or a server refuses the trainer.
    PeerLostError
        A server does not answer before the deadline.
    SystemExit
        This trainer, or the training run, has already completed.
    """
    if source in _trainers:
        raise ConfigurationError(
            "this model already trains with the parameter servers; expected to run the startup program, or "
            "fleet.init_worker(), only once"
        )
    strategy = _strategy_of(source, plan)
    settings = _settings(strategy)
    lifecycle.start(_trainer_role(plan, job))
    look = partial(end_if_finished, os.environ, plan.trainer_id)
    # This comes before any wait, because the servers of a finished training run do not come back.
    look()
    keep_freed_memory(os.environ)
    _, within = _choices.get(source, (None, None))
    thread = _serve_within(_make_server(within, source, job, settings)) if within is not None else None
    progress.waits_for("the parameter servers to let it join")
    trainer = Trainer.join(
        plan,
        source,
        job,
        settings,
        # Only step() finds out whether a gradient is finite; one that was sent early could not be held back.
        overlap=strategy.overlap if strategy.non_finite == "warn" else False,
        cross_step=strategy.cross_step,
        non_finite=strategy.non_finite,
        look=look,
        completed=partial(_end_if_completed, plan.trainer_id),
    )
    progress.waits_for(None)
    # A weak reference, here and below, because these must not keep a model alive that the script has dropped.
    progress.follow(partial(_steps_made, weakref.ref(trainer)))
    lifecycle.joined()
    # A server inside this process ends with it, and does not wait for this trainer.
    if thread is None:
        atexit.register(_remind, weakref.ref(trainer), settings.deadline_seconds)
    else:
        _threads_within[trainer] = thread
    _trainers[source] = trainer
    return trainer


def _steps_made(find: Callable[[], Trainer | None]) -> int:
    trainer = find()
    return 0 if trainer is None else trainer.current_step


def _end_if_completed(trainer: int, completed: Collection[int]) -> None:
    """Exit successfully if the servers report that an earlier process of this trainer completed.

    Raises
    ------
    SystemExit
        With status 0: there is nothing left to do.
    """
    if trainer in completed:
        _log.warning(
            "trainer %d has already completed, according to all parameter servers: nothing is left to do",
            trainer,
        )
        lifecycle.end_completed(completed)


def _remind(find: Callable[[], Trainer | None], deadline_seconds: float) -> None:
    """Warn at exit if the trainer has neither completed nor failed, because the servers will wait for it."""
    trainer = find()
    if trainer is not None and not trainer.completed and not lifecycle.failed():
        _log.warning(
            "the script ends without fleet.stop_worker(): the parameter servers treat trainer %d as lost, "
            "and wait %g s for it to restart (FLAGS_rpc_deadline). Call fleet.stop_worker(), or an "
            "Executor's close(), after the last step",
            trainer.plan.trainer_id,
            deadline_seconds,
        )


def start_server(whole: ServerPlan, source: Source, job: JobIdentity, model_dir: str | None = None) -> Server:
    """Start the server that a plan describes; the server then accepts trainers.

    Parameters
    ----------
    whole : ServerPlan
        The plan with whole blocks, which this function may slice into pieces.
    source : Source
        The module and the optimizer from which the plan was made.
    job : JobIdentity
    model_dir : str, optional
        The checkpoint to start from, or a folder of numbered checkpoints. By default the folder of the job's
        own checkpoints (``FLEET_CHECKPOINT_DIR``), which may still be empty.

    Raises
    ------
    ConfigurationError
        The named checkpoint does not exist or cannot be loaded, the endpoint is in use, or the script has
        converted the model since the plan was made.
    SystemExit
        This training run has already completed.
    """
    lifecycle.start(
        Role(
            kind=RoleKind.SERVER,
            index=whole.server,
            worker_num=whole.trainers,
            server_endpoints=whole.endpoints,
            current_endpoint=whole.endpoint,
            job=job,
        )
    )
    end_if_finished(os.environ)
    server = _make_server(whole, source, job, _settings(_strategy_of(source, whole)), model_dir)
    release(source)
    server.start()
    progress.waits_for(None)
    lifecycle.joined()
    return server


def _make_server(
    whole: ServerPlan, source: Source, job: JobIdentity, settings: Settings, model_dir: str | None = None
) -> Server:
    """Create a server with the values of a checkpoint or, without a checkpoint, those of the module."""
    for block in whole.blocks:
        check_dtype(block.param, source.parameters[block.param], dtype_of(block.dtype))
    server = Server(in_pieces(whole, settings), source.parameters, job, settings, state_of(source))
    directory = model_dir or os.environ.get("FLEET_CHECKPOINT_DIR", "").strip()
    if directory:
        progress.waits_for("its checkpoint to be read")
    if directory and server.loader.load(directory) is None and model_dir:
        raise CheckpointError(
            f"{model_dir} has no checkpoint; expected a directory with a {MANIFEST_NAME}, or numbered "
            f"directories ({CHECKPOINT_PREFIX}0, …) at least one of which has it"
        )
    return server


def _serve_within(server: Server) -> threading.Thread:
    """Run this process's own server in a thread, until the trainer completes or the process exits."""

    def run() -> None:
        try:
            server.serve()
        except FleetError as error:  # the trainer raises the same error, where the script sees it
            _log.debug("the parameter server of this process has ended: %s", error)
        finally:
            server.close()

    server.start()
    thread = threading.Thread(target=run, name="fleet-server", daemon=True)
    thread.start()
    return thread


def complete(trainer: Trainer) -> None:
    """Report a trainer's completion to the servers, and write the process's final progress.

    Raises
    ------
    PeerLostError
        A server does not answer before the deadline.
    """
    completed = trainer.complete()
    if (thread := _threads_within.get(trainer)) is not None:
        thread.join(_END_SECONDS)  # its server uses pools, which Python closes before it runs exit handlers
    lifecycle.finish(completed)


def serve(server: Server) -> None:
    """Serve until every trainer has completed, then write the completion marker and the final progress.

    Raises
    ------
    FleetError
        See `Server.serve`.
    """
    try:
        server.serve()
    finally:
        server.close()
    completed = server.completed_attempts
    if completed:
        leave_mark(os.environ, completed)
    lifecycle.finish(completed, completed)


def _strategy_of(source: Source, plan: TrainerPlan | ServerPlan) -> DistributedStrategy:
    """Return a session's strategy; log a warning if the script's mode overrides FLEET_SYNC_MODE."""
    if source in _choices:
        return _choices[source][0]
    asked = sync_mode_of(Variables(os.environ))
    found = plan.custom.name if plan.custom is not None else SYNC_MODES[plan.mode]
    if asked not in (SYNC_MODES[0], found):
        _log.warning(
            "FLEET_SYNC_MODE is %s, but the script has transpiled its program for %s, which takes precedence",
            asked,
            found,
        )
    return _DEFAULTS


def _settings(strategy: DistributedStrategy) -> Settings:
    for name in THREAD_NUMS:
        if os.environ.get(name):
            _log_unused_setting(name, os.environ[name])
    return replace(
        Settings.from_environ(os.environ),
        transport="tcp" if strategy.wire_dtype else strategy.transport,  # shared memory is not converted
        wire_dtype=strategy.wire_dtype or "",
        fused=strategy.server_kernels == "fused",
    )


@cache
def _log_unused_setting(name: str, value: str) -> None:
    """Log once that Paddle's setting for the number of threads has no effect."""
    _log.info(
        "%s is %s, but has no effect: one connection with each server carries all dense parameters, and one "
        "thread serves all connections",
        name,
        value,
    )


def _trainer_role(plan: TrainerPlan, job: JobIdentity) -> Role:
    return Role(
        kind=RoleKind.WORKER,
        index=plan.trainer_id,
        worker_num=plan.trainers,
        server_endpoints=plan.endpoints,
        job=job,
    )
