"""What a trainer of a collective job trains, to be saved, loaded and exported."""

import contextlib
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
    CHECKPOINT_PREFIX,
    Background,
    Checkpoint,
    Claims,
    Manifest,
    Piece,
    TrainerPart,
    TrainStatus,
    capture_part,
    check_each,
    commit,
    emptied,
    named_state,
    none_is_whole,
    numbers_in,
    remove_numbers,
    restore_part,
    restore_states,
    saves_in,
    superfluous,
    tell_passed_over,
    tidy,
    whole_numbers,
    write_shard,
    write_trainer_part,
)
from fleet.collective.copies import is_sharded
from fleet.collective.group import Group
from fleet.collective.synchronizer import Synchronizer
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.fluid import Program
from fleet.fluid.agreement import agreement_of
from fleet.fluid.capture import from_optimizer
from fleet.loop import Loops, Place
from fleet.plan import Source, facts_of_training
from fleet.plan.source import WITHOUT_NAMES
from fleet.process.descriptors import for_saves

__all__ = ["CollectiveTraining"]

_log = logging.getLogger(__name__)


class CollectiveTraining:
    """One optimizer and what it steps; see `fleet.checkpoint.Savable`.

    Every trainer holds the whole model, so one shard is enough: the checkpoint is that of a job with one
    parameter server, and either kind of job loads the other's.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    model : torch.nn.Module, optional
        Gives names and buffers.
    synchronizer : Synchronizer
        Counts the steps.
    group : Group
    claims : Claims
        Where this trainer writes, if it is the one that does.
    loops : Loops
        Those of the script; they go on where a checkpoint was made.
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
        self._claims = claims
        self._loops = loops
        self._optimizer = optimizer
        # The script may freeze some for a while; what a checkpoint holds does not depend on when it is made.
        self._trained = frozenset(
            each for group in optimizer.param_groups for each in group["params"] if each.requires_grad
        )
        self._model = model
        self._synchronizer = synchronizer
        self._group = group
        self._loads = 0
        self.background = Background()
        """What is being written while training goes on."""
        self._verified: dict[tuple[int, ...], str] = {}

    @property
    def current_step(self) -> int:
        """The number of steps made, from the job's beginning."""
        return self._synchronizer.steps.number

    def tell_of_unsavable(self) -> None:
        """Say in the log now what would make every save and export fail, perhaps after hours of training."""
        if _has_sharded(self._optimizer):  # and the log has said so
            return
        try:
            _, source = self._described()
        except Exception as error:  # noqa: BLE001 - training goes on, and a script may save by itself
            _log.warning(
                "fleet cannot save, load or export what this optimizer trains, and each such call will fail: "
                "%s. Training goes on, and state_dict()s are the script's to save",
                error,
            )
            return
        if not source.named:
            _log.info("%s; without, fleet.export_state_dict and save_inference_model fail", WITHOUT_NAMES)

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; see `Savable`."""
        self._synchronizer.settle("a checkpoint")
        self.background.save(directory, self.current_step, lambda: self._copy(Path(directory), status))

    def save_numbered(
        self,
        folder: str,
        status: TrainStatus,
        *,
        keep: int,
        incremental: bool = False,  # noqa: ARG002 - there are no tables on servers
    ) -> int:
        """Save one under a folder's next number; see `Savable`."""
        self._synchronizer.settle("a checkpoint")
        self.background.wait()
        number = -1
        with self.background.pausing(folder):
            number = max(numbers_in(Path(folder)), default=-1) + 1
        if number < 0:
            return number
        directory = Path(folder) / f"{CHECKPOINT_PREFIX}{number}"

        def copy() -> Callable[[], None]:
            write = self._copy(directory, status)

            def finish() -> None:
                try:
                    write()
                except FleetError:
                    with contextlib.suppress(FleetError):  # the reason that counts is the first
                        self._claims.hold(directory)
                        remove_numbers(Path(folder), [number])
                    raise
                if keep:
                    self._keep_newest(folder, keep)

            return finish

        self.background.begin(str(directory), self.current_step, copy)
        return number

    def _copy(self, path: Path, status: TrainStatus) -> Callable[[], None]:
        """Copy what is to be saved; return what writes the copy."""
        program, source = self._described()
        save, step = secrets.token_hex(4), self.current_step
        pieces = [
            Piece(
                name, 0, value.numel(), _copied(value.detach()), _copied(self._optimizer.state.get(value, {}))
            )
            for name, value in source.parameters.items()
        ]
        place = self._loops.place(step)
        part = capture_part(status, step, source, {}, astuple(place) if place is not None else None)
        trainers = replace(part, order=self._synchronizer.order).to_bytes()
        facts = facts_of_training(agreement_of(program))
        self._claims.hold(path)

        def write() -> None:
            shard = write_shard(path, save, "0-of-1", emptied(pieces))
            trainer = write_trainer_part(path, save, trainers)
            self._claims.hold(path)  # again: a successor may have come while the files were written
            commit(path, Manifest(save, step, facts, (shard, trainer), trainer.name).to_json())
            tidy(path)

        return write

    def hand_in(self, status: TrainStatus) -> None:  # noqa: ARG002 (trainer 0's counts)
        """Take part in what trainer 0 saves: what is in step already is its word alone."""
        self._synchronizer.settle("a checkpoint")

    def clean(self, folder: str, keep: int) -> None:
        """Remove a folder's checkpoints but the newest."""
        self.background.wait()
        self._keep_newest(folder, keep)

    def _keep_newest(self, folder: str, keep: int) -> None:
        path, spans = Path(folder), _spans(self._described()[1])
        self._claims.hold(path)
        whole = whole_numbers(path, lambda checkpoint: checkpoint.verify(self._verified, spans))
        remove_numbers(path, superfluous(numbers_in(path), whole, keep))

    @for_saves.lent()
    @torch.no_grad()
    def load(self, directory: str) -> TrainStatus | None:
        """Go on from the newest checkpoint in a directory that every trainer has whole; see `Savable`.

        Every trainer calls this, between two steps.

        Raises
        ------
        CheckpointError
            It is of another training, none is whole, or the trainers have found different ones.
        """
        self.background.wait()
        program, source = self._described()
        facts, folder = facts_of_training(agreement_of(program)), Path(directory)
        self._loads += 1
        self._group.agree(f"what was saved before load {self._loads}", "durable")  # trainer 0 has waited
        self._claims.renew(folder)
        shared, damage = self._shared(folder, source)
        for checkpoint in shared:
            try:
                checkpoint.check(facts, trainers_step=True)
            except CheckpointError:
                self._tell(damage, "nothing: the next one is refused")
                raise
            reasons = []
            try:
                pieces, part = _read(checkpoint, source)
            except CheckpointError as error:
                reasons.append(str(error))
            key = f"what was read of the save {checkpoint.manifest.save} for load {self._loads}"
            told = self._group.everybodys(key, json.dumps(reasons))
            everybodys = {rank: json.loads(text) for rank, text in told.items()}
            if not any(everybodys.values()):
                break
            damage += self._by_trainers(everybodys)
        else:
            if damage:
                raise none_is_whole(folder, damage, lambda beside: _read(beside, source))
            return None
        self._tell(damage, str(checkpoint.directory))
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
        """Return the checkpoints that all trainers see, the newest first, and what is wrong with others."""

        def check(checkpoint: Checkpoint) -> None:
            files = ((checkpoint, file) for file in checkpoint.files_with(_spans(source)))
            check_each(files, Checkpoint.check_size)

        found, damage = saves_in(folder, check)
        ours = [each.manifest.save for each in found]
        text = json.dumps([ours, list(map(str, damage))])
        told = self._group.everybodys(f"the checkpoints of load {self._loads}", text)
        everybodys: dict[int, tuple[list[str], list[str]]] = {
            rank: json.loads(each) for rank, each in told.items()
        }
        reasons = self._by_trainers({rank: each for rank, (_, each) in everybodys.items()})
        firsts = everybodys[min(everybodys)][0]
        shared = [save for save in firsts if all(save in theirs for theirs, _ in everybodys.values())]
        for rank, (theirs, _) in everybodys.items() if not shared else ():
            if theirs[:1] != ours[:1]:
                raise CheckpointError(
                    f"{self._group.place.name(rank)} has found {_words(theirs)}, and this trainer "
                    f"{_words(ours)}; expected one directory that every trainer sees"
                    + "".join(f"; {reason}" for reason in reasons)
                )
        if firsts[:1] != shared[:1] and not reasons:
            reasons = [f"not every trainer sees {_words(firsts)} in {folder}"]
        return [next(each for each in found if each.manifest.save == save) for save in shared], reasons

    def _by_trainers(self, everybodys: Mapping[int, Sequence[str]]) -> list[str]:
        """Return each reason once; one that not all have found, with who has."""
        ranks: dict[str, list[int]] = {}
        for rank, reasons in everybodys.items():
            for reason in reasons:
                ranks.setdefault(reason, []).append(rank)
        return [
            reason if len(having) == len(everybodys) else f"{self._group.place.names(having)}: {reason}"
            for reason, having in ranks.items()
        ]

    def _tell(self, damage: Sequence[str], used: str) -> None:
        """Tell of damage once for all trainers."""
        if self._group.place.rank == 0:
            tell_passed_over(damage, used)

    def export(self, table_ids: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the model as one process's ``load_state_dict`` takes it; see `named_state`."""
        if table_ids:
            raise ConfigurationError(
                f"table_ids are of {', '.join(table_ids)}, and a collective job has no tables on servers; "
                "expected none"
            )
        source = self._described()[1]
        values = {name: value.detach().cpu().clone() for name, value in source.parameters.items()}
        return named_state(source, values)

    def _described(self) -> tuple[Program, Source]:
        if _has_sharded(self._optimizer):
            raise ConfigurationError(
                "parameters are sharded (DTensor), of which this trainer has a part only; expected "
                "torch.distributed.checkpoint to save and load them"
            )
        program = from_optimizer(Program, self._optimizer, self._model, trained=self._trained)
        if program.source is None:
            raise ConfigurationError("the optimizer cannot be described, so it cannot be saved")
        return program, program.source


def _spans(source: Source) -> list[tuple[str, int, int]]:
    return [(name, 0, value.numel()) for name, value in source.parameters.items()]


def _read(checkpoint: Checkpoint, source: Source) -> tuple[dict[str, Piece], TrainerPart | None]:
    """Read all of it before any of it is used; CheckpointError that names each file which is damaged."""
    files = ((checkpoint, file) for file in checkpoint.files_with(_spans(source)))
    check_each(files, Checkpoint.checked)
    pieces = {
        name: checkpoint.piece(name, 0, value.numel(), tuple(value.shape))
        for name, value in source.parameters.items()
    }
    part = checkpoint.trainer_part()
    return pieces, TrainerPart.from_bytes(part, str(checkpoint.directory)) if part is not None else None


def _has_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(is_sharded(each) for group in optimizer.param_groups for each in group["params"])


def _copied(value: Any) -> Any:
    """Return a copy, on the CPU, of a tensor or of what an optimizer keeps."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _words(saves: Sequence[str]) -> str:
    return f"the save {saves[0]}" if saves else "no checkpoint"
