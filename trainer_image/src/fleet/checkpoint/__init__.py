"""Checkpoints: files with a model, its optimizers' state and the progress of the training run.

A checkpoint is a directory with a manifest. Each writer creates separate files, under temporary names until
they are complete and durable. The manifest, which names all files with sizes and digests, is written last and
makes them a checkpoint; a directory without one is not a checkpoint. A reader loads the elements that it
needs, regardless of how the saving servers had divided them. Tensors are in safetensors files, everything
else is JSON: loading runs no code.
"""

from fleet.checkpoint.calls import Savable, SavingCalls
from fleet.checkpoint.export import export_tables, named_state, read_table_file, write_table_file
from fleet.checkpoint.finished import FINISHED_NAME, end_if_finished, leave_mark, read_mark
from fleet.checkpoint.folders import (
    CHECKPOINT_PREFIX,
    Claims,
    find_checkpoint,
    list_checkpoints,
    list_complete_numbers,
    list_numbers,
    no_complete_checkpoint,
    removable_numbers,
    remove_numbers,
    warn_of_skipped,
)
from fleet.checkpoint.manifest import MANIFEST_NAME, MOST_BEFORE, BaseRecord, FileRecord, Manifest, RowsRecord
from fleet.checkpoint.reader import TRAINERS_STATE, Checkpoint, Piece, check_files, cut_state, join_pieces
from fleet.checkpoint.rows import open_base, read_rows, row_files, rows_have_state, write_rows
from fleet.checkpoint.saver import Saver
from fleet.checkpoint.trainer_part import (
    GradientOrder,
    OwnRows,
    TrainerPart,
    TrainStatus,
    capture_part,
    restore_part,
    restore_states,
    restore_values,
)
from fleet.checkpoint.values import decode, encode
from fleet.checkpoint.writer import commit, is_written, tidy, write_shard, write_trainer_part

__all__ = [
    "CHECKPOINT_PREFIX",
    "FINISHED_NAME",
    "MANIFEST_NAME",
    "MOST_BEFORE",
    "TRAINERS_STATE",
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
    "Saver",
    "SavingCalls",
    "TrainStatus",
    "TrainerPart",
    "capture_part",
    "check_files",
    "commit",
    "cut_state",
    "decode",
    "encode",
    "end_if_finished",
    "export_tables",
    "find_checkpoint",
    "is_written",
    "join_pieces",
    "leave_mark",
    "list_checkpoints",
    "list_complete_numbers",
    "list_numbers",
    "named_state",
    "no_complete_checkpoint",
    "open_base",
    "read_mark",
    "read_rows",
    "read_table_file",
    "removable_numbers",
    "remove_numbers",
    "restore_part",
    "restore_states",
    "restore_values",
    "row_files",
    "rows_have_state",
    "tidy",
    "warn_of_skipped",
    "write_rows",
    "write_shard",
    "write_table_file",
    "write_trainer_part",
]
