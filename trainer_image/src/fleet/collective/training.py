"""Saving, loading and exporting in a trainer of a collective job."""

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint import (
    Checkpoint,
    Claims,
    Manifest,
    Piece,
    Saver,
    TrainerPart,
    TrainStatus,
    capture_part,
    check_files,
    commit,
    list_checkpoints,
    list_complete_numbers,
    list_numbers,
    named_state,
    no_complete_checkpoint,
    removable_numbers,
    remove_numbers,
    restore_part,
    restore_states,
    tidy,
    warn_of_skipped,
    write_shard,
    write_trainer_part,
)
from fleet.collective.copies import is_sharded
from fleet.collective.group import Group
from fleet.collective.synchronizer import Synchronizer
from fleet.errors import CheckpointError, ConfigurationError
from fleet.loop import Loops, Place
from fleet.plan import Source, facts_of_training
from fleet.plan.capture import capture_loop
from fleet.plan.source import WITHOUT_NAMES
from fleet.plan.spec import TrainingSpec
from fleet.process.resources import for_saves

__all__ = ["CollectiveTraining"]

_log = logging.getLogger(__name__)


class CollectiveTraining(Saver):
    """Saves, loads and exports an optimizer and the tensors that it updates.

    Every trainer holds the whole model, so a checkpoint has one shard. Its format is that of a job with one
    parameter server, and either kind of job can load the other's.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    model : torch.nn.Module, optional
        Provides names and buffers.
    synchronizer : Synchronizer
        Counts the steps.
    group : Group
    claims : Claims
        This trainer's claims on the folders that it writes to.
    loops : Loops
        The script's loops, which resume where a checkpoint was made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        synchronizer: Synchronizer,
        group: Group,
        claims: Claims,
        loops: Loops,
    ) -> None:
        super().__init__()
        self._claims = claims
        self._loops = loops
        self._optimizer = optimizer
        # Collected once: the script may freeze some parameters for a while, but every checkpoint must hold
        # the same.
        self._trained = frozenset(
            each for group in optimizer.param_groups for each in group["params"] if each.requires_grad
        )
        self._model = model
        self._synchronizer = synchronizer
        self._group = group
        self._loads = 0
        self._verified: dict[tuple[int, ...], str] = {}

    @property
    def current_step(self) -> int:
        """The number of steps since the start of the job."""
        return self._synchronizer.steps.number

    def log_unsavable(self) -> None:
        """Log, early in training, the problems that would make every save and export fail."""
        if _has_sharded(self._optimizer):  # the reason has been logged already
            return
        try:
            _, source = self._described()
        except Exception as error:  # noqa: BLE001 - training continues, and the script may save in another way
            _log.warning(
                "fleet cannot save, load or export the parameters of this optimizer, and each such call "
                "will fail: %s. Training continues; save the state_dict() of model and optimizer in the "
                "script",
                error,
            )
            return
        if not source.named:
            _log.info(
                "%s; without names, fleet.export_state_dict and save_inference_model fail", WITHOUT_NAMES
            )

    def save(self, directory: str, status: TrainStatus) -> None:
        """Make the trainers' copies equal, then save a checkpoint; see `Saver.save`."""
        self._synchronizer.equalize("a checkpoint")
        super().save(directory, status)

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int, incremental: bool = False) -> int:
        """Make the trainers' copies equal, then save under the next number; see `Saver.save_numbered`."""
        self._synchronizer.equalize("a checkpoint")
        return super().save_numbered(folder, status, keep=keep, incremental=incremental)

    def _copy(
        self,
        directory: str,
        status: TrainStatus,
        *,
        incremental: bool = False,  # noqa: ARG002 - there are no tables on servers
    ) -> Callable[[], None]:
        spec, source = self._described()
        path, save, step = Path(directory), secrets.token_hex(4), self.current_step
        # Copies, because training goes on while the thread writes.
        pieces = [
            Piece(
                name, 0, value.numel(), _copied(value.detach()), _copied(self._optimizer.state.get(value, {}))
            )
            for name, value in source.parameters.items()
        ]
        place = self._loops.place(step)
        part = capture_part(status, step, source, {}, astuple(place) if place is not None else None)
        part_bytes = replace(part, order=self._synchronizer.order).to_bytes()
        facts = facts_of_training(spec.agreement())
        self._claims.hold(path)

        def write() -> None:
            shard = write_shard(path, save, "0-of-1", pieces)
            trainer = write_trainer_part(path, save, part_bytes)
            self._claims.hold(
                path
            )  # checked again, because a successor may have started while the files were written
            commit(path, Manifest(save, step, facts, (shard, trainer), trainer.name).to_json())
            tidy(path)

        return write

    def _list_numbers(self, folder: str) -> list[int]:
        return list_numbers(Path(folder))

    def _remove(self, folder: str, number: int) -> None:
        self._claims.hold(Path(folder))
        remove_numbers(Path(folder), [number])

    def _keep_newest(self, folder: str, keep: int) -> None:
        path, spans = Path(folder), _spans(self._described()[1])
        self._claims.hold(path)
        whole = list_complete_numbers(path, lambda checkpoint: checkpoint.verify(self._verified, spans))
        remove_numbers(path, removable_numbers(list_numbers(path), whole, keep))

    def submit_status(self, status: TrainStatus) -> None:  # noqa: ARG002 (trainer 0's counts)
        """Make the copies equal for trainer 0's save; this trainer's own status is discarded."""
        self._synchronizer.equalize("a checkpoint")

    @for_saves.lent()
    @torch.no_grad()
    def load(self, directory: str) -> TrainStatus | None:
        """Load the newest checkpoint in a directory that every trainer can read completely; see `Savable`.

        Every trainer must call this, between two steps.

        Raises
        ------
        CheckpointError
            The checkpoint is of another model, none is complete, or the trainers found different ones.
        """
        self.wait()
        spec, source = self._described()
        facts, folder = facts_of_training(spec.agreement()), Path(directory)
        self._loads += 1
        self._group.agree(
            f"the saves before load {self._loads}", "durable"
        )  # trainer 0 must have finished its save first
        self._claims.renew(folder)
        shared, damage = self._shared(folder, source)
        for checkpoint in shared:
            try:
                checkpoint.check(facts, trainers_step=True)
            except CheckpointError:
                self._log_damage(damage, "nothing: the next one is refused")
                raise
            reasons = []
            try:
                pieces, part = _read(checkpoint, source)
            except CheckpointError as error:
                reasons.append(str(error))
            key = f"the result of reading the save {checkpoint.manifest.save} for load {self._loads}"
            texts = self._group.gather(key, json.dumps(reasons))
            by_rank = {rank: json.loads(text) for rank, text in texts.items()}
            if not any(by_rank.values()):
                break
            damage += self._with_trainers(by_rank)
        else:
            if damage:
                raise no_complete_checkpoint(folder, damage, lambda beside: _read(beside, source))
            return None
        self._log_damage(damage, str(checkpoint.directory))
        for name, value in source.parameters.items():
            value.copy_(pieces[name].value)
        restore_states({name: piece.state for name, piece in pieces.items()}, source)
        self._synchronizer.steps.number = checkpoint.manifest.step
        if part is None:
            return TrainStatus(step=checkpoint.manifest.step)
        restore_part(part, source)
        self._loops.resume(Place(*part.loop) if part.loop is not None else None)
        if part.order is not None:
            self._synchronizer.resume(part.order)
        return part.status

    def _shared(self, folder: Path, source: Source) -> tuple[list[Checkpoint], list[str]]:
        """Return the checkpoints that all trainers can see, newest first, and the reasons to skip others."""

        def check(checkpoint: Checkpoint) -> None:
            files = ((checkpoint, file) for file in checkpoint.files_with(_spans(source)))
            check_files(files, Checkpoint.check_size)

        found, damage = list_checkpoints(folder, check)
        ours = [each.manifest.save for each in found]
        text = json.dumps([ours, list(map(str, damage))])
        texts = self._group.gather(f"the checkpoints of load {self._loads}", text)
        by_rank: dict[int, tuple[list[str], list[str]]] = {
            rank: json.loads(each) for rank, each in texts.items()
        }
        reasons = self._with_trainers({rank: each for rank, (_, each) in by_rank.items()})
        firsts = by_rank[min(by_rank)][0]
        shared = [save for save in firsts if all(save in theirs for theirs, _ in by_rank.values())]
        for rank, (theirs, _) in by_rank.items() if not shared else ():
            if theirs[:1] != ours[:1]:
                raise CheckpointError(
                    f"{self._group.world.name(rank)} has found {_words(theirs)}, and this trainer "
                    f"{_words(ours)}; expected one directory that every trainer sees"
                    + "".join(f"; {reason}" for reason in reasons)
                )
        if firsts[:1] != shared[:1] and not reasons:
            reasons = [f"not every trainer sees {_words(firsts)} in {folder}"]
        return [next(each for each in found if each.manifest.save == save) for save in shared], reasons

    def _with_trainers(self, by_rank: Mapping[int, Sequence[str]]) -> list[str]:
        """Return the distinct reasons, each with the trainers that reported it unless all trainers did."""
        ranks: dict[str, list[int]] = {}
        for rank, reasons in by_rank.items():
            for reason in reasons:
                ranks.setdefault(reason, []).append(rank)
        return [
            reason if len(having) == len(by_rank) else f"{self._group.world.names(having)}: {reason}"
            for reason, having in ranks.items()
        ]

    def _log_damage(self, damage: Sequence[str], used: str) -> None:
        """Log damaged checkpoints once for all trainers."""
        if self._group.world.rank == 0:
            warn_of_skipped(damage, used)

    def export(self, table_ids: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the model's state dict for ``load_state_dict`` in one process; see `named_state`."""
        if table_ids:
            raise ConfigurationError(
                f"table_ids names {', '.join(table_ids)}, but a collective job has no tables on servers; "
                "expected no table_ids"
            )
        source = self._described()[1]
        values = {name: value.detach().cpu().clone() for name, value in source.parameters.items()}
        return named_state(source, values)

    def _described(self) -> tuple[TrainingSpec, Source]:
        if _has_sharded(self._optimizer):
            raise ConfigurationError(
                "parameters are sharded (DTensor), and this trainer has only a part of them; expected "
                "torch.distributed.checkpoint to save and load them"
            )
        return capture_loop(self._optimizer, self._model, trained=self._trained)


def _spans(source: Source) -> list[tuple[str, int, int]]:
    return [(name, 0, value.numel()) for name, value in source.parameters.items()]


def _read(checkpoint: Checkpoint, source: Source) -> tuple[dict[str, Piece], TrainerPart | None]:
    """Read a whole checkpoint; raise a CheckpointError that names each damaged file."""
    files = ((checkpoint, file) for file in checkpoint.files_with(_spans(source)))
    check_files(files, Checkpoint.verify_file)
    pieces = {
        name: checkpoint.piece(name, 0, value.numel(), tuple(value.shape))
        for name, value in source.parameters.items()
    }
    part = checkpoint.part_of(0)
    return pieces, TrainerPart.from_bytes(part, str(checkpoint.directory)) if part is not None else None


def _has_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(is_sharded(each) for group in optimizer.param_groups for each in group["params"])


def _copied(value: Any) -> Any:
    """Copy a tensor, or optimizer state of any structure, to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _words(saves: Sequence[str]) -> str:
    return f"the save {saves[0]}" if saves else "no checkpoint"
