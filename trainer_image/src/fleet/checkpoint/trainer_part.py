"""A trainer's own part of a checkpoint.

Buffers, the parameters that nobody steps, the options of the param groups, and the script's words.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fleet.checkpoint.fields import PARSE_ERRORS, items, mapping, whole_number
from fleet.checkpoint.status import TrainStatus
from fleet.checkpoint.values import decode, encode
from fleet.errors import CheckpointError
from fleet.plan import Source
from fleet.plan.optimizers import KERNEL_FLAGS
from fleet.plan.source import parameter_names
from fleet.tables import TableRows

__all__ = ["GradientOrder", "OwnRows", "TrainerPart", "capture_part", "restore_part", "restore_states"]

_STORY = "trainer"
_NAMED = 3
# A param group's list of parameters and their names are the process's own, not options.
_NOT_OPTIONS = frozenset({"params", "param_names"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The optimizer's state of rows that a trainer steps by itself."""

    steps: int = 0
    """How many it has made."""
    tables: Mapping[str, TableRows] = field(default_factory=dict)
    """By name, with ascending ids and without values, which the servers have."""


@dataclass(frozen=True, slots=True)
class GradientOrder:
    """The order in which gradients travel: sums of three and more depend on it in their last bits."""

    names: tuple[str | None, ...]
    """Of all parameters, and None in the place of what the trainers tell each other beside."""
    once_unused: tuple[str, ...] = ()
    """The parameters that nobody has used in some pass, so that the order no longer changes for them."""


@dataclass(frozen=True, slots=True)
class TrainerPart:
    """What a checkpoint holds beside the parameters and their optimizers' state."""

    status: TrainStatus = field(default_factory=TrainStatus)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The module's, by name: BatchNorm's running statistics, for instance."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The options of each param group, the learning rate among them."""
    optimizer_state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By parameter, where trainers step by themselves; otherwise it is in the shards."""
    loop: tuple[int, int, int] | None = None
    """Where a collective training is in its loops, as `fleet.loop.Place` has it; None where nobody knows."""
    own_rows: OwnRows = field(default_factory=OwnRows)
    """Of tables, where trainers step by themselves."""
    order: GradientOrder | None = None
    """Of collective training whose gradients are averaged."""
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that are in no shard, by name: frozen ones, and those that no optimizer has."""

    def to_bytes(self) -> bytes:
        """Return the part as a safetensors file.

        Raises
        ------
        ConfigurationError
            The status holds something that no checkpoint can; the message says where.
        """
        tensors = {f"buffers.{name}": buffer for name, buffer in self.buffers.items()}
        tensors |= {f"parameters.{name}": value for name, value in self.parameters.items()}
        story = {
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
        apart = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
        return save(apart, {"format": "pt", _STORY: json.dumps(story)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "TrainerPart":
        """Return what `to_bytes` wrote.

        Raises
        ------
        CheckpointError
            It did not write this; `where` names it in the message.
        """
        try:
            tensors = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            story = json.loads(header["__metadata__"][_STORY])
            return cls(
                TrainStatus(
                    whole_number("epoch_no", story["epoch_no"], least=-1),
                    whole_number("step", story["step"]),
                    mapping("state", decode(story["state"], tensors)),
                ),
                {name: tensors[f"buffers.{name}"] for name in story["buffers"]},
                [
                    mapping("a param group", group)
                    for group in items("groups", decode(story["groups"], tensors))
                ],
                {
                    name: mapping("the state of a parameter", entries)
                    for name, entries in mapping(
                        "optimizer_state", decode(story["optimizer_state"], tensors)
                    ).items()
                },
                _loop(story.get("loop")),
                _decode_rows(story.get("rows"), tensors),
                _order(story.get("order")),
                # Earlier versions wrote none.
                {name: tensors[f"parameters.{name}"] for name in story.get("parameters", ())},
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
    """Return this process's part, as it is after `step` steps; `own_state` is by parameter."""
    groups = [
        {name: option for name, option in group.items() if name not in _NOT_OPTIONS}
        for group in source.optimizer.param_groups
    ]
    others = _others(source)
    parameters = {name: value for name, value in others.items() if _is_plain(value)}
    _tell(
        "a checkpoint leaves out %s: sharded, sparse or quantized, they fit into no file of tensors",
        [name for name in others if name not in parameters],
    )
    return TrainerPart(
        replace(status, step=step),
        _buffers(source.module),
        groups,
        own_state,
        loop,
        own_rows or OwnRows(),
        parameters=parameters,
    )


@torch.no_grad()
def restore_part(part: TrainerPart, source: Source) -> None:
    """Set all that is in no shard, the parameters among it, to what a checkpoint has.

    Raises
    ------
    CheckpointError
        The module has other buffers, or such a parameter is another; or the optimizer has another number of
        param groups.
    """
    module, optimizer = source.module, source.optimizer
    found = _buffers(module)
    if module is not None:
        _check_alike("buffers", {**found, **part.buffers}, found, part.buffers)
    others = _others(source)
    kept = {name: each for name, each in others.items() if name in part.parameters and _is_plain(each)}
    _check_alike("parameters", kept, kept, part.parameters)
    for name, buffer in found.items():
        buffer.copy_(part.buffers[name])
    for name, value in kept.items():
        value.copy_(part.parameters[name])
    _tell(
        "the checkpoint has no values of %s: they stay what the script has made them",
        [name for name in others if name not in kept],
    )
    if len(part.groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(part.groups)} param groups and the optimizer "
            f"{len(optimizer.param_groups)}; expected the optimizer that was saved"
        )
    for group, options in zip(optimizer.param_groups, part.groups, strict=True):
        # How a step is computed is this process's choice, on its device.
        group.update({name: option for name, option in options.items() if name not in KERNEL_FLAGS})
    restore_states(part.optimizer_state, source)


def restore_states(states: Mapping[str, Mapping[str, Any]], source: Source) -> None:
    """Give an optimizer the state of parameters, on the device where torch keeps each entry.

    That is the parameter's, but for the count of steps, which only kernels that need it there have on a
    device; see ``torch.optim.Optimizer.load_state_dict``.

    Parameters
    ----------
    states : mapping of name to mapping
        The entries of each parameter; names that the source lacks are passed over.
    source : Source
    """
    names = {parameter: name for name, parameter in source.parameters.items()}
    for group in source.optimizer.param_groups:
        counts_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            name = names.get(parameter)
            if name is not None and name in states:
                source.optimizer.state[parameter] = {
                    entry: kept if entry == "step" and not counts_on_device else _of(parameter, kept)
                    for entry, kept in states[name].items()
                }


def _of(parameter: Tensor, kept: Any) -> Any:
    """Return an entry with its tensors on the parameter's device, and laid out as the parameter is."""
    if isinstance(kept, Tensor):
        if kept.shape != parameter.shape:
            return kept.to(parameter.device)
        return torch.empty_like(parameter, dtype=kept.dtype).copy_(kept)  # fused kernels read the memory
    if isinstance(kept, list | tuple):
        return type(kept)(_of(parameter, item) for item in kept)
    if type(kept) is dict:
        return {key: _of(parameter, item) for key, item in kept.items()}
    return kept


def _encode_rows(rows: OwnRows, tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Add rows to the tensors of a file; return which entries each table has."""
    for name, found in rows.tables.items():
        tensors[f"rows.{name}.ids"] = torch.from_numpy(found.ids)
        tensors.update({f"rows.{name}.state.{entry}": state for entry, state in found.state.items()})
    return {name: list(found.state) for name, found in rows.tables.items()}


def _decode_rows(found: object, tensors: Mapping[str, Tensor]) -> OwnRows:
    """Return what `_encode_rows` wrote; earlier versions wrote none."""
    if found is None:
        return OwnRows()
    story, tables = mapping("rows", found), {}
    for name, entries in mapping("tables", story["tables"]).items():
        ids = tensors[f"rows.{name}.ids"]
        state = {entry: tensors[f"rows.{name}.state.{entry}"] for entry in items("entries", entries)}
        if ids.dtype != torch.int64 or ids.dim() != 1 or not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(f"the ids of table {name} do not ascend, or are no int64")
        for entry, each in state.items():
            if each.dtype != torch.float32 or each.dim() != 2 or len(each) != len(ids):
                raise ValueError(
                    f"{entry} of table {name} is {each.dtype}{list(each.shape)}; expected float32 with "
                    f"{len(ids)} rows"
                )
        tables[name] = TableRows(ids.numpy(), torch.empty(len(ids), 0, dtype=torch.float32), state)
    return OwnRows(whole_number("steps", story["steps"]), tables)


def _loop(found: object) -> tuple[int, int, int] | None:
    """Return the numbers of a place; earlier versions wrote none."""
    if found is None:
        return None
    loops, steps, per_epoch = items("loop", found)
    return (
        whole_number("loops", loops),
        whole_number("steps", steps),
        whole_number("per_epoch", per_epoch, least=1),
    )


def _order(found: object) -> GradientOrder | None:
    """Return the order of gradients; earlier versions wrote none."""
    if found is None:
        return None
    story = mapping("order", found)
    names, unused = (items(key, story[key]) for key in ("names", "once_unused"))
    if not all(name is None or isinstance(name, str) for name in names) or not set(unused) <= set(names):
        raise ValueError("the order of gradients holds what is no parameter's name")
    return GradientOrder(tuple(names), tuple(unused))


def _buffers(module: Module | None) -> dict[str, Tensor]:
    """Return the buffers that a module's state dict has."""
    if module is None:
        return {}
    kept = module.state_dict(keep_vars=True)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name: buffer for name, buffer in kept.items() if name in buffers}


def _others(source: Source) -> dict[str, Tensor]:
    """Return the parameters that no shard has.

    Of a module those that its state dict has too: what a script leaves out of that, such as a large model
    that it reads from elsewhere, is left out here.
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
        kept = {id(value) for value in state.values()}  # which may go by other names there
        others = {name: value for name, value in others.items() if name in state or id(value) in kept}
    return {name: value.detach() for name, value in others.items()}


def _is_plain(value: Tensor) -> bool:
    """Whether a file of tensors can hold one as it is."""
    whole = type(value) is Tensor and value.layout is torch.strided  # neither sharded nor sparse
    return whole and value.dtype is not torch.complex128 and not (value.is_meta or value.is_quantized)


def _tell(message: str, names: Sequence[str]) -> None:
    """Log a warning about some parameters, if there are any."""
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        _log.warning(message, ", ".join(names[:_NAMED]) + more)


def _check_alike(
    what: str, names: Iterable[str], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> None:
    differing = sorted(name for name in names if not _alike(name, ours, theirs))
    if differing:
        raise CheckpointError(
            f"the checkpoint and the model have different {what}: {', '.join(differing[:_NAMED])}; "
            "expected the model that was saved"
        )


def _alike(name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    mine, other = ours.get(name), theirs.get(name)
    return mine is not None and other is not None and (mine.shape, mine.dtype) == (other.shape, other.dtype)
