"""Which batches of an epoch are left, in an order that a process which begins anew finds again."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Generic, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

__all__ = ["Batches", "Order", "length_of", "rest_of"]

Batch = TypeVar("Batch")

_log = logging.getLogger(__name__)
_SEEDS: Final = 1 << 63
_KEPT: Final = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "pin_memory_device",
    "in_order",
)
"""What a loader of the rest has in common with the loader; older versions of PyTorch lack the last ones."""


class Batches(Generic[Batch]):
    """An epoch's batches without those that have been trained on.

    In all else this is the loader: ``len()`` is that of the whole epoch, and every attribute is the loader's.

    Parameters
    ----------
    loader : iterable
    enter : callable
        Begins an iteration over what is left.
    """

    def __init__(self, loader: Iterable[Batch], enter: Callable[[], Iterator[Batch]]) -> None:
        self._loader = loader
        self._enter = enter

    def __iter__(self) -> Iterator[Batch]:
        return self._enter()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # the loader says it if it has none

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self._loader, name)


class Order:
    """Makes the order of a loader's samples a matter of the epoch's number alone.

    Parts that have a ``set_epoch`` are told the epoch. Samplers that draw from a generator get one of their
    own with a seed for each epoch, as `torch.utils.data.DistributedSampler` has it.

    Parameters
    ----------
    loader : iterable
        Of a DataLoader its dataset and its samplers count as well.
    seed : int
        Of samplers without a generator; one that has a generator begins with the seed of that.
    """

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        sampler, batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
        inner = getattr(batch_sampler, "sampler", None)
        present: list[Any] = [each for each in (sampler, batch_sampler, inner) if each is not None]
        samplers = {id(each): each for each in present}
        told = [loader, getattr(loader, "dataset", None), *samplers.values()]
        self._told = [each for each in told if callable(getattr(each, "set_epoch", None))]
        self._seeded = [
            (each, seed if (own := each.generator) is None else own.initial_seed())
            for each in samplers.values()
            if _draws(each)
        ]
        known = {id(each) for each in (*self._told, *(each for each, _ in self._seeded))}
        indexed = not isinstance(getattr(loader, "dataset", None), IterableDataset)
        self.unknown = [
            type(each).__name__
            for each in samplers.values()
            if indexed and id(each) not in known and type(each) not in (BatchSampler, SequentialSampler)
        ]
        """Samplers, by class, of which nobody knows whether they find an order again."""

    def begin(self, epoch: int) -> None:
        """Let what is iterated over next be this epoch."""
        for part in self._told:
            part.set_epoch(epoch)
        for sampler, seed in self._seeded:
            sampler.generator = torch.Generator().manual_seed((seed + epoch) % _SEEDS)


def _draws(sampler: Any) -> bool:
    """Whether a sampler draws its order from a generator."""
    return isinstance(sampler, Sampler) and isinstance(
        getattr(sampler, "generator", 0), torch.Generator | None
    )


def length_of(batches: Iterable[Any]) -> int | None:
    """Return how many batches there are in one iteration; None where that is not known."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def rest_of(batches: Iterable[Batch], made: int) -> Iterator[Batch]:
    """Iterate over all batches but the first ones.

    Parameters
    ----------
    batches : iterable
        A sequence, or a DataLoader of a dataset that is indexed, is entered in the middle: nothing is loaded
        that is not needed. Of anything else what comes before is read and dropped.
    made : int
        How many to leave out.
    """
    if made == 0:
        return iter(batches)
    if isinstance(batches, Sequence):
        return (batches[place] for place in range(made, len(batches)))
    if (
        isinstance(batches, DataLoader)
        and type(batches).__iter__ is DataLoader.__iter__
        and not isinstance(batches.dataset, IterableDataset)
    ):
        return iter(_entered(batches, made))
    _log.info(
        "%s cannot be entered in the middle: the %d batches that have been trained on are read and dropped",
        type(batches).__name__,
        made,
    )
    return islice(iter(batches), made, None)


class _Rest(Sampler[Any]):
    """What a sampler gives, but the first so many."""

    def __init__(self, sampler: Iterable[Any], made: int) -> None:
        self._sampler = sampler
        self._made = made

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._made, None)


def _entered(loader: DataLoader[Batch], made: int) -> DataLoader[Batch]:
    """Return a loader of the rest of one epoch. Its workers end with it, whatever the loader's own do."""
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if loader.batch_sampler is None:
        return DataLoader(batch_size=None, sampler=_Rest(loader.sampler, made), **kept)
    return DataLoader(batch_sampler=_Rest(loader.batch_sampler, made), **kept)
