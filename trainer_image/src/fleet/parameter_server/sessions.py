"""The training sessions of this process, by the PyTorch objects that they train.

An `Executor` that runs a program and a loop that calls ``optimizer.step()`` share one session: each of them
finds the session that the other has started.
"""

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial
from typing import Final

from fleet.checkpoint import CHECKPOINT_PREFIX, MANIFEST_NAME, end_if_finished, leave_mark
from fleet.errors import CheckpointError, ConfigurationError
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

__all__ = ["find_trainer", "serve", "start_server", "start_trainer", "train_as"]

_log = logging.getLogger(__name__)
_DEFAULTS: Final = DistributedStrategy()
_strategies: "weakref.WeakKeyDictionary[Source, DistributedStrategy]" = weakref.WeakKeyDictionary()
_trainers: "weakref.WeakKeyDictionary[Source, Trainer]" = weakref.WeakKeyDictionary()


def find_trainer(source: Source) -> Trainer | None:
    """Return the session that trains a source, or None."""
    return _trainers.get(source)


def train_as(source: Source, strategy: DistributedStrategy) -> None:
    """Set the strategy for a source's sessions, regardless of whether a loop or an Executor starts them."""
    _strategies[source] = strategy


def start_trainer(plan: TrainerPlan, source: Source, job: JobIdentity) -> Trainer:
    """Join the servers of a plan, and adopt their values.

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
        This trainer or the training had already completed.
    """
    if source in _trainers:
        raise ConfigurationError(
            "this model trains with the parameter servers already; expected the startup program, or "
            "fleet.init_worker(), once"
        )
    strategy = _strategy_of(source, plan)
    settings = _settings(strategy)
    lifecycle.start(_trainer_role(plan, job))
    look = partial(end_if_finished, os.environ, plan.trainer_id)
    look()
    keep_freed_memory(os.environ)
    progress.waits_for("the parameter servers to let it join")
    trainer = Trainer.join(
        plan,
        source,
        job,
        settings,
        overlap=strategy.overlap if strategy.non_finite == "warn" else False,
        cross_step=strategy.cross_step,
        non_finite=strategy.non_finite,
        look=look,
        completed=partial(_end_if_completed, plan.trainer_id),
    )
    progress.waits_for(None)
    progress.follow(partial(_steps_made, weakref.ref(trainer)))
    lifecycle.joined()
    atexit.register(_remind, weakref.ref(trainer), settings.deadline_seconds)
    _trainers[source] = trainer
    return trainer


def _steps_made(find: Callable[[], Trainer | None]) -> int:
    trainer = find()
    return 0 if trainer is None else trainer.current_step


def _end_if_completed(trainer: int, completed: Collection[int]) -> None:
    """End this trainer successfully if, according to the servers, its previous process has completed.

    Raises
    ------
    SystemExit
        With status 0: there is nothing left to do.
    """
    if trainer in completed:
        _log.warning(
            "trainer %d has completed before, as all parameter servers say: nothing is left to do", trainer
        )
        lifecycle.end_completed(completed)


def _remind(find: Callable[[], Trainer | None], deadline_seconds: float) -> None:
    """Warn at exit that the servers will wait for this trainer, unless it has reported an error."""
    trainer = find()
    if trainer is not None and not trainer.completed and not lifecycle.failed():
        _log.warning(
            "the script ends without fleet.stop_worker(): to the parameter servers trainer %d is lost, and "
            "they wait %g s for it to come back (FLAGS_rpc_deadline). Call fleet.stop_worker(), or an "
            "Executor's close(), after the last step",
            trainer.plan.trainer_id,
            deadline_seconds,
        )


def start_server(whole: ServerPlan, source: Source, job: JobIdentity, model_dir: str | None = None) -> Server:
    """Start a server of a plan, which then accepts trainers.

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
        This training had already completed.
    """
    settings = _settings(_strategy_of(source, whole))
    plan = in_pieces(whole, settings)
    for block in whole.blocks:
        check_dtype(block.param, source.parameters[block.param], dtype_of(block.dtype))
    lifecycle.start(
        Role(
            kind=RoleKind.SERVER,
            index=plan.server,
            worker_num=plan.trainers,
            server_endpoints=plan.endpoints,
            current_endpoint=plan.endpoint,
            job=job,
        )
    )
    end_if_finished(os.environ)
    server = Server(plan, source.parameters, job, settings, state_of(source))
    directory = model_dir or os.environ.get("FLEET_CHECKPOINT_DIR", "").strip()
    if directory:
        progress.waits_for("its checkpoint to be read")
    if directory and server.loader.load(directory) is None and model_dir:
        raise CheckpointError(
            f"{model_dir} has no checkpoint; expected a directory with a {MANIFEST_NAME}, or numbered ones "
            f"({CHECKPOINT_PREFIX}0, …) of which one has it"
        )
    release(source)
    server.start()
    progress.waits_for(None)
    lifecycle.joined()
    return server


def serve(server: Server) -> None:
    """Serve until every trainer has completed; then write the completion marker and the final progress.

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
    """Return the strategy of a session; log it if the script's mode overrides FLEET_SYNC_MODE."""
    if (strategy := _strategies.get(source)) is not None:
        return strategy
    asked = sync_mode_of(Variables(os.environ))
    found = plan.custom.name if plan.custom is not None else SYNC_MODES[plan.mode]
    if asked not in (SYNC_MODES[0], found):
        _log.warning(
            "FLEET_SYNC_MODE is %s, and the script has transpiled for %s, which counts",
            asked,
            found,
        )
    return _DEFAULTS


def _settings(strategy: DistributedStrategy) -> Settings:
    for name in THREAD_NUMS:
        if os.environ.get(name):
            _tell_of_threads(name, os.environ[name])
    return replace(
        Settings.from_environ(os.environ),
        transport="tcp" if strategy.wire_dtype else strategy.transport,  # shared memory is not converted
        wire_dtype=strategy.wire_dtype or "",
        fused=strategy.server_kernels == "fused",
    )


@cache
def _tell_of_threads(name: str, value: str) -> None:
    """Log, once per process, that Paddle's setting for a number of threads has no effect."""
    _log.info(
        "%s is %s, and changes nothing: one connection with a thread for each direction serves all dense "
        "parameters of a server",
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
