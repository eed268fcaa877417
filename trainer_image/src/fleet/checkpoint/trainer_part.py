"""A trainer's part of a checkpoint: all data that the servers' shards do not contain.

The part contains the script's status, the module's buffers, the parameters that no server updates, and the
options of the param groups. Trainers that have their own optimizers add the optimizer state.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fleet.checkpoint.values import PARSE_ERRORS, as_count, as_list, as_mapping, decode, encode
from fleet.errors import CheckpointError
from fleet.plan import Source
from fleet.plan.optimizers import KERNEL_FLAGS
from fleet.plan.source import parameter_names
from fleet.tables import TableRows

__all__ = [
    "GradientOrder",
    "OwnRows",
    "TrainStatus",
    "TrainerPart",
    "capture_part",
    "restore_part",
    "restore_states",
    "restore_values",
]

_METADATA: Final = "trainer"
"""The key of the JSON in the file's metadata."""
_MOST_NAMES: Final = 3
"""Maximum number of parameters that a message names."""
# A param group's list of parameters and their names belong to the process; they are not options.
_NOT_OPTIONS: Final = frozenset({"params", "param_names"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """The data, besides parameter values, that a script needs to resume from a checkpoint.

    Attributes
    ----------
    epoch_no : int
        The last completed epoch; -1 before the end of the first one.
    step : int
        The number of steps run when the checkpoint was saved. The save fills it in.
    state : mapping
        Further values to restore, such as ``{"scheduler": scheduler.state_dict()}``: numbers, strings, None,
        tensors, arrays, and lists, tuples and dicts of these.

    Notes
    -----
    Paddle's ``fluid.incubate.fleet.collective.TrainStatus`` has only `epoch_no`.
    """

    epoch_no: int = -1
    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)

    def next(self) -> int:
        """Return the number of the epoch at which to resume."""
        return self.epoch_no + 1


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Optimizer state of rows that the trainer updates itself, as in GEO mode."""

    steps: int = 0
    """The number of steps run."""
    tables: Mapping[str, TableRows] = field(default_factory=dict)
    """The optimizer state by table, with ascending ids. The rows have no values: those are on the servers."""


@dataclass(frozen=True, slots=True)
class GradientOrder:
    """The order in which gradients are reduced; it affects the sums if there are three or more trainers."""

    names: tuple[str | None, ...]
    """The names of the parameters in this order; None stands for the trainers' control data."""
    once_unused: tuple[str, ...] = ()
    """The parameters that some backward pass did not use, and which therefore no longer change the order."""


@dataclass(frozen=True, slots=True)
class TrainerPart:
    """The contents of a trainer's part of a checkpoint."""

    status: TrainStatus = field(default_factory=TrainStatus)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The module's buffers by name, such as BatchNorm's running statistics."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The options of each param group, such as the learning rate."""
    optimizer_state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Optimizer state by parameter, if trainers have their own optimizers; otherwise the shards have it."""
    loop: tuple[int, int, int] | None = None
    """The position of a collective training run in its loops, as a `fleet.loop.Place`; None if unknown."""
    own_rows: OwnRows = field(default_factory=OwnRows)
    """The optimizer state of tables, if trainers update them."""
    order: GradientOrder | None = None
    """The order in which collective training reduces gradients; None if there is no such order."""
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """The parameters that are in no shard, by name: frozen ones, and those of no optimizer."""

    def to_bytes(self) -> bytes:
        """Return the part as a safetensors file.

        Raises
        ------
        ConfigurationError
            The status holds a value that a checkpoint cannot hold; the message gives its path.
        """
        tensors = {f"buffers.{name}": buffer for name, buffer in self.buffers.items()}
        tensors |= {f"parameters.{name}": value for name, value in self.parameters.items()}
        metadata = {
            "epoch_no": self.status.epoch_no,
            "step": self.status.step,
            "state": encode(self.status.state, tensors, "state"),
            "groups": encode(list(self.groups), tensors, "param_groups"),
            "optimizer_state": encode(self.optimizer_state, tensors, "optimizer_state"),
            "buffers": list(self.buffers),
            "parameters": list(self.parameters),
            "loop": self.loop,
            "order": asdict(self.order) if self.order is not None else None,
            "rows": {"steps": self.own_rows.steps, "tables": _encode_rows(self.own_rows, tensors)},
        }
        copies = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
        return save(copies, {"format": "pt", _METADATA: json.dumps(metadata)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "TrainerPart":
        """Parse the result of `to_bytes`.

        Parameters
        ----------
        data : bytes
        where : str
            Names the source in error messages.

        Raises
        ------
        CheckpointError
            The data is not a trainer's part.
        """
        try:
            tensors = load(data)
            # `load` returns no metadata.
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            found = json.loads(header["__metadata__"][_METADATA])
            groups = as_list("groups", decode(found["groups"], tensors))
            states = as_mapping("optimizer_state", decode(found["optimizer_state"], tensors))
            # Earlier versions wrote no loop, rows, order or parameters.
            return cls(
                TrainStatus(
                    as_count("epoch_no", found["epoch_no"], least=-1),
                    as_count("step", found["step"]),
                    as_mapping("state", decode(found["state"], tensors)),
                ),
                {name: tensors[f"buffers.{name}"] for name in found["buffers"]},
                [as_mapping("a param group", group) for group in groups],
                {name: as_mapping("the state of a parameter", each) for name, each in states.items()},
                _decode_loop(found.get("loop")),
                _decode_rows(found.get("rows"), tensors),
                _decode_order(found.get("order")),
                {name: tensors[f"parameters.{name}"] for name in found.get("parameters", ())},
            )
        except (SafetensorError, *PARSE_ERRORS) as error:
            raise CheckpointError(
                f"{where} is not the trainer's part of a checkpoint: {error}; load another checkpoint"
            ) from error


def capture_part(
    status: TrainStatus,
    step: int,
    source: Source,
    own_state: Mapping[str, Mapping[str, Any]],
    loop: tuple[int, int, int] | None = None,
    own_rows: OwnRows | None = None,
) -> TrainerPart:
    """Collect this trainer's part.

    Parameters
    ----------
    status : TrainStatus
    step : int
        Is filled into the status.
    source : Source
    own_state : mapping of name to mapping
        The state of this trainer's own optimizer, by parameter.
    loop, own_rows
        As in `TrainerPart`.
    """
    groups = [
        {name: option for name, option in group.items() if name not in _NOT_OPTIONS}
        for group in source.optimizer.param_groups
    ]
    others = _parameters_in_no_shard(source)
    parameters = {name: value for name, value in others.items() if _is_storable(value)}
    _warn(
        "a checkpoint leaves out %s: a file of tensors cannot hold sharded, sparse or quantized tensors",
        [name for name in others if name not in parameters],
    )
    return TrainerPart(
        replace(status, step=step),
        _buffers_of(source.module),
        groups,
        own_state,
        loop,
        own_rows or OwnRows(),
        parameters=parameters,
    )


def restore_part(part: TrainerPart, source: Source) -> None:
    """Restore buffers, parameters that no shard contains, param groups and local optimizer state.

    Raises
    ------
    CheckpointError
        As for `restore_values`, or the numbers of param groups differ.
    """
    restore_values(part, source)
    optimizer = source.optimizer
    if len(part.groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(part.groups)} param groups and the optimizer has "
            f"{len(optimizer.param_groups)}; expected the optimizer that was saved"
        )
    for group, options in zip(optimizer.param_groups, part.groups, strict=True):
        # Kernel flags depend on this process's device, not on the checkpoint.
        group.update({name: option for name, option in options.items() if name not in KERNEL_FLAGS})
    restore_states(part.optimizer_state, source)


@torch.no_grad()
def restore_values(part: TrainerPart, source: Source) -> None:
    """Restore buffers and the parameters that no shard contains.

    Raises
    ------
    CheckpointError
        Names, shapes or dtypes of buffers or parameters differ.
    """
    module = source.module
    buffers = _buffers_of(module)
    if module is not None:
        _check_same("buffers", {**buffers, **part.buffers}, buffers, part.buffers)
    others = _parameters_in_no_shard(source)
    kept = {name: each for name, each in others.items() if name in part.parameters and _is_storable(each)}
    _check_same("parameters", kept, kept, part.parameters)
    for name, buffer in buffers.items():
        buffer.copy_(part.buffers[name])
    for name, value in kept.items():
        value.copy_(part.parameters[name])
    _warn(
        "the checkpoint has no values of %s: these parameters keep the values that the script gave them",
        [name for name in others if name not in kept],
    )


def restore_states(states: Mapping[str, Mapping[str, Any]], source: Source) -> None:
    """Set the optimizer state of parameters, with each tensor on the device that torch expects.

    This is the parameter's device. Only the step count stays on the CPU, unless a fused or capturable kernel
    needs it on the device; see ``torch.optim.Optimizer.load_state_dict``.

    Parameters
    ----------
    states : mapping of name to mapping
        The entries of each parameter; names that the source lacks are ignored.
    source : Source
    """
    names = {parameter: name for name, parameter in source.parameters.items()}
    for group in source.optimizer.param_groups:
        counts_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            name = names.get(parameter)
            if name is not None and name in states:
                source.optimizer.state[parameter] = {
                    entry: kept if entry == "step" and not counts_on_device else _laid_out_as(parameter, kept)
                    for entry, kept in states[name].items()
                }


def _laid_out_as(parameter: Tensor, kept: Any) -> Any:
    """Return an entry whose tensors have the parameter's device and memory format."""
    if isinstance(kept, Tensor):
        if kept.shape != parameter.shape:
            return kept.to(parameter.device)
        # Fused kernels ignore strides and read the memory in order.
        return torch.empty_like(parameter, dtype=kept.dtype).copy_(kept)
    if isinstance(kept, list | tuple):
        return type(kept)(_laid_out_as(parameter, item) for item in kept)
    if type(kept) is dict:
        return {key: _laid_out_as(parameter, item) for key, item in kept.items()}
    return kept


def _encode_rows(rows: OwnRows, tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Add the rows' state to `tensors`; return the names of each table's state entries."""
    for name, found in rows.tables.items():
        tensors[f"rows.{name}.ids"] = torch.from_numpy(found.ids)
        tensors.update({f"rows.{name}.state.{entry}": state for entry, state in found.state.items()})
    return {name: list(found.state) for name, found in rows.tables.items()}


def _decode_rows(found: object, tensors: Mapping[str, Tensor]) -> OwnRows:
    if found is None:
        return OwnRows()
    fields, tables = as_mapping("rows", found), {}
    for name, entries in as_mapping("tables", fields["tables"]).items():
        ids = tensors[f"rows.{name}.ids"]
        state = {entry: tensors[f"rows.{name}.state.{entry}"] for entry in as_list("entries", entries)}
        if ids.dtype != torch.int64 or ids.dim() != 1 or not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(f"the ids of table {name} are not ascending int64")
        for entry, each in state.items():
            if each.dtype != torch.float32 or each.dim() != 2 or len(each) != len(ids):
                raise ValueError(
                    f"{entry} of table {name} is {each.dtype}{list(each.shape)}; expected float32 with "
                    f"{len(ids)} rows"
                )
        tables[name] = TableRows(ids.numpy(), torch.empty(len(ids), 0, dtype=torch.float32), state)
    return OwnRows(as_count("steps", fields["steps"]), tables)


def _decode_loop(found: object) -> tuple[int, int, int] | None:
    if found is None:
        return None
    loops, steps, per_epoch = as_list("loop", found)
    return (
        as_count("loops", loops),
        as_count("steps", steps),
        as_count("per_epoch", per_epoch, least=1),
    )


def _decode_order(found: object) -> GradientOrder | None:
    if found is None:
        return None
    fields = as_mapping("order", found)
    names, unused = (as_list(key, fields[key]) for key in ("names", "once_unused"))
    if not all(name is None or isinstance(name, str) for name in names) or not set(unused) <= set(names):
        raise ValueError("the order of gradients has an entry that is not a parameter's name")
    return GradientOrder(tuple(names), tuple(unused))


def _buffers_of(module: Module | None) -> dict[str, Tensor]:
    """Return the buffers among the entries of a module's state dict."""
    if module is None:
        return {}
    kept = module.state_dict(keep_vars=True)
    # A state dict has a shared buffer under each of its names.
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name: buffer for name, buffer in kept.items() if name in buffers}


def _parameters_in_no_shard(source: Source) -> dict[str, Tensor]:
    """Return the parameters that are in the module's state dict but not on any server.

    A script may leave parameters out of the state dict, such as a large model that it loads from elsewhere;
    the checkpoint leaves them out as well.
    """
    held = {id(each) for each in (*source.parameters.values(), *source.own_tables.values())}
    names, _ = parameter_names(source.optimizer, source.module)
    others = {
        name: parameter
        for parameter, name in names.items()
        if id(parameter) not in held and not hasattr(parameter, "fleet_table") and not is_lazy(parameter)
    }
    if source.module is not None and others:
        state = source.module.state_dict(keep_vars=True)
        kept = {id(value) for value in state.values()}  # a hook may have renamed the entry
        others = {name: value for name, value in others.items() if name in state or id(value) in kept}
    return {name: value.detach() for name, value in others.items()}


def _is_storable(value: Tensor) -> bool:
    """Return whether a safetensors file can store a tensor unchanged."""
    dense = type(value) is Tensor and value.layout is torch.strided  # neither sharded nor sparse
    return dense and value.dtype is not torch.complex128 and not (value.is_meta or value.is_quantized)


def _warn(message: str, names: Sequence[str]) -> None:
    """Log a warning that lists the given parameters, if there are any."""
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        _log.warning(message, ", ".join(names[:_MOST_NAMES]) + more)


def _check_same(
    what: str, names: Iterable[str], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> None:
    differing = sorted(name for name in names if _form(ours.get(name)) != _form(theirs.get(name)))
    if differing:
        raise CheckpointError(
            f"the checkpoint and the model have different {what}: {', '.join(differing[:_MOST_NAMES])}; "
            "expected the model that was saved"
        )


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
