"""Saves and loads the variables of programs, as Paddle's ``fluid.io`` does.

Each variable is saved in a file with the variable's name; with a `filename`, all variables are in one file.
The files have the safetensors format. A program for inference is saved as ``__model__`` in the same folder:
the JSON of `Program.to_json`, with the names of the fed and fetched variables.

In a job with servers, `save_persistables` and `load_persistables` save and load their checkpoints, like the
methods of the job's `fleet`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError
from safetensors.torch import load as deserialised
from safetensors.torch import save as serialised
from torch import Tensor

from fleet.checkpoint import TrainStatus
from fleet.checkpoint.files import disk_errors, open_file, write_bytes
from fleet.errors import CheckpointError, ConfigurationError
from fleet.fluid.execution import resume
from fleet.fluid.names import missing
from fleet.fluid.paddle.reader import (
    ComposeNotAligned,
    batch,
    buffered,
    cache,
    chain,
    compose,
    firstn,
    map_readers,
    shuffle,
    xmap_readers,
)
from fleet.fluid.program import Program, default_main_program
from fleet.fluid.reader import DataLoader, PyReader
from fleet.fluid.scope import global_scope
from fleet.parameter_server.sessions import find_trainer
from fleet.parameter_server.trainer.trainer import Trainer

__all__ = [
    "ComposeNotAligned",
    "DataLoader",
    "PyReader",
    "batch",
    "buffered",
    "cache",
    "chain",
    "compose",
    "firstn",
    "is_parameter",
    "is_persistable",
    "load_inference_model",
    "load_params",
    "load_persistables",
    "load_vars",
    "map_readers",
    "save_inference_model",
    "save_params",
    "save_persistables",
    "save_vars",
    "shuffle",
    "xmap_readers",
]

if not TYPE_CHECKING:
    __getattr__ = missing("io")

Folder = str | PathLike[str]

_MODEL: Final = "__model__"
_KEY: Final = "fleet.fluid"
"""The key that identifies the file of a program for inference; its value is the version of the format."""
_VERSION: Final = 1


def is_persistable(var: Any) -> bool:
    """Return whether a variable keeps its value between steps, like parameters and optimizer state.

    Parameters
    ----------
    var : Variable
    """
    return bool(var.persistable)


def is_parameter(var: Any) -> bool:
    """Return whether a variable is a parameter.

    Parameters
    ----------
    var : Variable
    """
    return bool(var.is_parameter)


def save_vars(
    executor: Any,
    dirname: Folder,
    main_program: Program | None = None,
    vars: Sequence[Any] | None = None,  # noqa: A002 - Paddle's name
    predicate: Callable[[Any], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Save variables of a program to files.

    Parameters
    ----------
    executor : Executor
        Has no effect.
    dirname : path
        The folder; created if it is missing.
    main_program : Program, optional
        By default ``fluid.default_main_program()``.
    vars : sequence of Variable or str, optional
        The variables; by default those for which `predicate` returns True.
    predicate : callable, optional
        Takes a variable.
    filename : str, optional
        The file for all variables; by default each variable has its own file, with the variable's name.

    Raises
    ------
    ConfigurationError
        There are no such variables, or they have no values because the startup program has not run.
    FleetError
        A file could not be written; the message names the file.
    """
    del executor
    program = _program(main_program)
    values = _values(_chosen(program, vars, predicate, "save_vars"))
    folder = Path(dirname)
    files = (
        {filename: values} if filename is not None else {name: {name: each} for name, each in values.items()}
    )
    for name, held in files.items():
        path = _inside(folder, name)
        with disk_errors(path):
            write_bytes(path, serialised(held))


def save_params(
    executor: Any, dirname: Folder, main_program: Program | None = None, filename: str | None = None
) -> None:
    """Save the parameters of a program to files; see `save_vars`.

    Parameters
    ----------
    executor, dirname, main_program, filename
        As for `save_vars`.
    """
    save_vars(executor, dirname, main_program, None, is_parameter, filename)


def save_persistables(
    executor: Any, dirname: Folder, main_program: Program | None = None, filename: str | None = None
) -> None:
    """Save all persistable variables of a program; in a job, save a checkpoint.

    Parameters
    ----------
    executor, dirname, main_program, filename
        As for `save_vars`. In a job, `filename` has no effect, and every trainer makes the call.

    Raises
    ------
    ConfigurationError, FleetError
        As for `save_vars`; in a job as for ``fleet.save_persistables``.
    """
    program = _program(main_program)
    trainer = _trainer_of(program)
    if trainer is None:
        save_vars(executor, dirname, program, None, is_persistable, filename)
    elif trainer.plan.trainer_id == 0:
        trainer.save(str(dirname), TrainStatus())
    else:
        trainer.submit_status(TrainStatus())


def load_vars(
    executor: Any,
    dirname: Folder,
    main_program: Program | None = None,
    vars: Sequence[Any] | None = None,  # noqa: A002 - Paddle's name
    predicate: Callable[[Any], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Load variables of a program from files.

    Parameters
    ----------
    executor, dirname, main_program, vars, predicate, filename
        As for `save_vars`.

    Raises
    ------
    CheckpointError
        A file is missing or damaged, or its shape or dtype differs from the variable's.
    ConfigurationError
        There are no such variables.
    """
    del executor
    program = _program(main_program)
    chosen = _chosen(program, vars, predicate, "load_vars")
    folder = Path(dirname)
    together = None if filename is None else _read(_inside(folder, filename))
    found = {}
    for variable in chosen:
        path = _inside(folder, filename or variable.name)
        held = together if together is not None else _read(path)
        found[variable.name] = _fitting(variable, held, path)
    # All values are checked before the first one is set, so that a damaged file changes nothing.
    for name, value in found.items():
        global_scope().set(name, value)


def load_params(
    executor: Any, dirname: Folder, main_program: Program | None = None, filename: str | None = None
) -> None:
    """Load the parameters of a program from files; see `load_vars`.

    Parameters
    ----------
    executor, dirname, main_program, filename
        As for `load_vars`.
    """
    load_vars(executor, dirname, main_program, None, is_parameter, filename)


def load_persistables(
    executor: Any, dirname: Folder, main_program: Program | None = None, filename: str | None = None
) -> None:
    """Load all persistable variables of a program; in a job, load a checkpoint.

    Parameters
    ----------
    executor, dirname, main_program, filename
        As for `load_vars`. In a job, `filename` has no effect, and every trainer makes the call.

    Raises
    ------
    CheckpointError, ConfigurationError
        As for `load_vars`; in a job as for ``fleet.load_persistables``.
    """
    program = _program(main_program)
    trainer = _trainer_of(program)
    if trainer is not None:
        if trainer.load(str(dirname)) is None:
            raise CheckpointError(f"{dirname} has no checkpoint; expected one that save_persistables wrote")
        assert program.source is not None  # noqa: S101 - it has a trainer
        resume(program.source, trainer)
        return
    load_vars(executor, dirname, program, None, is_persistable, filename)


def save_inference_model(
    dirname: Folder,
    feeded_var_names: Sequence[str],
    target_vars: list[Any],
    executor: Any,
    main_program: Program | None = None,
    model_filename: str | None = None,
    params_filename: str | None = None,
    export_for_deployment: bool = True,
    program_only: bool = False,
) -> list[str]:
    """Save the part of a program that computes the target variables, and its parameters.

    Parameters
    ----------
    dirname : path
    feeded_var_names : sequence of str
        The data that is fed.
    target_vars : list of Variable
        The variables to compute.
    executor : Executor
        Has no effect.
    main_program : Program, optional
        By default ``fluid.default_main_program()``.
    model_filename : str, optional
        The file of the program; ``__model__`` by default.
    params_filename : str, optional
        The file for all values; by default each variable has its own file.
    export_for_deployment : bool
        Has no effect, because there is only one format.
    program_only : bool
        Do not save the values.

    Returns
    -------
    list of str
        The names of `target_vars`.

    Raises
    ------
    ConfigurationError
        The variables do not belong to the program, or need data that is not fed.
    FleetError
        A file could not be written; the message names the file.
    """
    del export_for_deployment
    feeded = [feeded_var_names] if isinstance(feeded_var_names, str) else list(feeded_var_names)
    targets = [each.name for each in target_vars]
    pruned = _pruned(_program(main_program), feeded, targets)
    path = _inside(Path(dirname), model_filename or _MODEL)
    facts = {_KEY: _VERSION, "feed": feeded, "fetch": targets, "program": json.loads(pruned.to_json())}
    with disk_errors(path):
        write_bytes(path, json.dumps(facts).encode())
    if not program_only:
        held = [each for each in pruned.list_vars() if is_persistable(each)]
        if held:
            save_vars(executor, dirname, main_program, held, None, params_filename)
    return targets


def load_inference_model(
    dirname: Folder,
    executor: Any,
    model_filename: str | None = None,
    params_filename: str | None = None,
    pserver_endpoints: Sequence[str] | None = None,
) -> tuple[Program, list[str], list[Any]]:
    """Load a program and its parameters from the output of `save_inference_model`.

    Parameters
    ----------
    dirname : path
    executor : Executor
        Has no effect.
    model_filename, params_filename : str, optional
        The file names with which the program was saved.
    pserver_endpoints : sequence of str, optional
        Not supported, because an inference model contains all its values.

    Returns
    -------
    program : Program
    feed_target_names : list of str
    fetch_targets : list of Variable

    Raises
    ------
    CheckpointError
        A file is missing or damaged.
    ConfigurationError
        `pserver_endpoints` is given.
    """
    if pserver_endpoints:
        raise ConfigurationError(
            f"load_inference_model: pserver_endpoints is {pserver_endpoints!r}; expected none, because only "
            "trainers look up tables on parameter servers"
        )
    path = _inside(Path(dirname), model_filename or _MODEL)
    try:
        with open_file(path) as file:
            facts = json.load(file)
        _check_version(facts[_KEY])
        program = Program.from_json(json.dumps(facts["program"]))
        feed, targets = [str(name) for name in facts["feed"]], [str(name) for name in facts["fetch"]]
        fetch = [program.global_block().var(name) for name in targets]
    except (OSError, ValueError, LookupError, TypeError, ConfigurationError) as error:
        raise CheckpointError(
            f"{path} is not a program for inference: {error}; expected a file that save_inference_model wrote"
        ) from error
    held = [each for each in program.list_vars() if is_persistable(each)]
    if held:
        load_vars(executor, dirname, program, held, None, params_filename)
    return program, feed, fetch


def _check_version(version: object) -> None:
    if version != _VERSION:
        raise ValueError(f"its version is {version!r}, not {_VERSION}")


def _program(given: Any) -> Program:
    return given if given is not None else default_main_program()


def _chosen(
    program: Program, given: Sequence[Any] | None, predicate: Callable[[Any], bool] | None, call: str
) -> list[Any]:
    block = program.global_block()
    if given is not None:
        variables = [block.var(each if isinstance(each, str) else each.name) for each in given]
    else:
        variables = [each for each in program.list_vars() if predicate is None or predicate(each)]
    if not variables:
        raise ConfigurationError(
            f"{call}: the program has no such variables; expected vars or a predicate that choose some"
        )
    return variables


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; reject a name that refers to a file outside the folder."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
        raise ConfigurationError(
            f"{name!r} does not name a file below {folder}; expected a relative path without '..'"
        )
    return path


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        with open_file(path) as file:
            return deserialised(file.read())
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {error}; expected a file that fleet.fluid.io saved"
        ) from error


def _fitting(variable: Any, held: Mapping[str, Tensor], path: Path) -> Tensor:
    """Return a variable's value from a file; raise CheckpointError if it is missing or does not match."""
    if variable.name not in held:
        raise CheckpointError(f"{path} has no {variable.name}; it has {', '.join(sorted(held)) or 'nothing'}")
    value = held[variable.name]
    found = str(value.dtype).removeprefix("torch.")
    if tuple(value.shape) != tuple(variable.shape) or found != variable.dtype:
        raise CheckpointError(
            f"{path}: {variable.name} is {found}{list(value.shape)}; expected that of the program, "
            f"{variable.dtype}{list(variable.shape)}"
        )
    return value


def _trainer_of(program: Program) -> Trainer | None:
    """Return the trainer's session in a job with parameter servers, or None in a single process."""
    return None if program.source is None else find_trainer(program.source)


def _values(variables: Iterable[Any]) -> dict[str, Tensor]:
    held = global_scope().values
    without = [each.name for each in variables if each.name not in held]
    if without:
        raise ConfigurationError(
            f"{', '.join(without)} have no values to save; expected the startup program to be run first"
        )
    return {each.name: held[each.name].detach().cpu().contiguous() for each in variables}


def _pruned(program: Program, feeded: Sequence[str], targets: Sequence[str]) -> Program:
    """Return a program with only the operators needed to compute the targets from the feeds."""
    pruned = program.clone(for_test=True)
    block = pruned.global_block()
    if unknown := [name for name in (*feeded, *targets) if not block.has_var(name)]:
        raise ConfigurationError(
            f"save_inference_model: the program has no {', '.join(unknown)}; expected variables of its "
            "global block"
        )
    wanted, kept = set(targets), []
    for op in reversed(block.ops):
        # A program for inference is fed, even if a loader provides the data of training.
        if op.type != "read" and wanted.intersection(op.output_arg_names).difference(feeded):
            kept.append(op)
            wanted.update(op.input_arg_names)
    block.ops[:] = reversed(kept)
    used = {name for op in kept for name in (*op.input_arg_names, *op.output_arg_names)} | {*feeded, *targets}
    block.vars = {name: each for name, each in block.vars.items() if name in used}
    made = {name for op in kept for name in op.output_arg_names}
    unfed = [
        name
        for name in block.vars
        if name not in feeded and name not in made and not block.vars[name].persistable
    ]
    if unfed:
        raise ConfigurationError(
            f"save_inference_model: {', '.join(targets)} need {', '.join(unfed)}, which feeded_var_names "
            "does not have; expected every piece of data that they are computed from"
        )
    return pruned
