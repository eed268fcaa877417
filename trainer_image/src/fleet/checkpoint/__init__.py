"""Checkpoints: files that hold a model, its optimizers' state and the place where training was.

A checkpoint is a directory with a manifest. Each writer leaves a file of its own, under a temporary name
until it is whole and on the disk; the manifest, which names them all with their sizes and digests, comes
last and makes them a checkpoint. A directory without a manifest is none. Whoever reads takes the elements
that it needs, however they were cut when they were written. No pickle anywhere: tensors are in safetensors
files, everything else is JSON.
"""

from fleet.checkpoint.calls import Savable, SavingCalls
from fleet.checkpoint.claim import Claims
from fleet.checkpoint.cleaning import tidy
from fleet.checkpoint.export import export_tables
from fleet.checkpoint.finished import FINISHED_NAME, end_if_finished, leave_mark, read_mark
from fleet.checkpoint.folders import (
    CHECKPOINT_PREFIX,
    find_checkpoint,
    none_is_whole,
    numbers_in,
    remove_numbers,
    saves_in,
    superfluous,
    tell_passed_over,
    whole_numbers,
)
from fleet.checkpoint.manifest import MANIFEST_NAME, MOST_BEFORE, BaseRecord, FileRecord, Manifest, RowsRecord
from fleet.checkpoint.named import named_state
from fleet.checkpoint.piece import Piece, cut_state, emptied, join_pieces
from fleet.checkpoint.reader import TRAINERS_STATE, Checkpoint, check_each
from fleet.checkpoint.rows import base_of, files_of, have_state, read_rows, write_rows
from fleet.checkpoint.saver import Background
from fleet.checkpoint.status import TrainStatus
from fleet.checkpoint.trainer_part import (
    GradientOrder,
    OwnRows,
    TrainerPart,
    capture_part,
    restore_part,
    restore_states,
)
from fleet.checkpoint.values import decode, encode
from fleet.checkpoint.writer import commit, write_shard, write_trainer_part

__all__ = [
    "CHECKPOINT_PREFIX",
    "FINISHED_NAME",
    "MANIFEST_NAME",
    "MOST_BEFORE",
    "TRAINERS_STATE",
    "Background",
    "BaseRecord",
    "Checkpoint",
    "Claims",
    "FileRecord",
    "GradientOrder",
    "Manifest",
    "OwnRows",
    "Piece",
    "RowsRecord",
    "Savable",
    "SavingCalls",
    "TrainStatus",
    "TrainerPart",
    "base_of",
    "capture_part",
    "check_each",
    "commit",
    "cut_state",
    "decode",
    "emptied",
    "encode",
    "end_if_finished",
    "export_tables",
    "files_of",
    "find_checkpoint",
    "have_state",
    "join_pieces",
    "leave_mark",
    "named_state",
    "none_is_whole",
    "numbers_in",
    "read_mark",
    "read_rows",
    "remove_numbers",
    "restore_part",
    "restore_states",
    "saves_in",
    "superfluous",
    "tell_passed_over",
    "tidy",
    "whole_numbers",
    "write_rows",
    "write_shard",
    "write_trainer_part",
]
