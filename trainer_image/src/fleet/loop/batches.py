"""The remaining batches of an epoch in a reproducible order, and the prefetching of table rows."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, Final, Generic, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from fleet.errors import ConfigurationError

__all__ = ["Batches", "Order", "length_of", "prefetch", "rest_of"]

Batch = TypeVar("Batch")

_log = logging.getLogger(__name__)
_SEEDS: Final = 1 << 63
_LOADER_OPTIONS: Final = (
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
"""The options that a loader of the remaining batches copies; older versions of PyTorch lack the last ones."""


class Batches(Generic[Batch]):
    """A wrapper of a loader that changes only how the loader is iterated.

    In all other respects it behaves like the loader: ``len()`` is that of the whole epoch, and every
    attribute is the loader's.

    Parameters
    ----------
    loader : iterable
    enter : callable
        Starts an iteration.
    """

    def __init__(self, loader: Iterable[Batch], enter: Callable[[], Iterator[Batch]]) -> None:
        self._loader = loader
        self._enter = enter

    def __iter__(self) -> Iterator[Batch]:
        return self._enter()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # the loader raises the error if it has no length

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # copy.copy reads attributes before __init__ has run
            raise AttributeError(name)
        return getattr(self._loader, name)


class Order:
    """Makes the order of a loader's samples depend only on the epoch.

    The ``set_epoch`` of each part that has one is called. Samplers that draw from a generator get a new
    generator for each epoch, seeded as `torch.utils.data.DistributedSampler` seeds its own.

    Parameters
    ----------
    loader : iterable
        A loader. The dataset and the samplers of a DataLoader are parts, too.
    seed : int
        The seed of samplers without a generator; others keep the seed of their generator.
    """

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        sampler, batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
        inner = getattr(batch_sampler, "sampler", None)
        present: list[Any] = [each for each in (sampler, batch_sampler, inner) if each is not None]
        samplers = {id(each): each for each in present}
        parts = [loader, getattr(loader, "dataset", None), *samplers.values()]
        self._epoch_aware = [each for each in parts if callable(getattr(each, "set_epoch", None))]
        self._seeded = [
            (each, seed if (own := each.generator) is None else own.initial_seed())
            for each in samplers.values()
            if _draws(each)
        ]
        known = {id(each) for each in (*self._epoch_aware, *(each for each, _ in self._seeded))}
        indexed = not isinstance(getattr(loader, "dataset", None), IterableDataset)
        self.unknown = [
            type(each).__name__
            for each in samplers.values()
            if indexed and id(each) not in known and type(each) not in (BatchSampler, SequentialSampler)
        ]
        """The classes of samplers whose order may not be reproducible."""

    def begin(self, epoch: int) -> None:
        """Set the order of the loader's next iteration to that of an epoch."""
        for part in self._epoch_aware:
            part.set_epoch(epoch)
        for sampler, seed in self._seeded:
            sampler.generator = torch.Generator().manual_seed((seed + epoch) % _SEEDS)

    def warn_of_unknown(self) -> None:
        """Warn if the samples of this epoch may come in another order than before a restart."""
        if self.unknown:
            _log.warning(
                "%s has neither set_epoch(epoch) nor a generator: the order of this epoch may differ from "
                "its order before a restart, so some samples may be used twice and others not at all",
                " and ".join(self.unknown),
            )


def _draws(sampler: Any) -> bool:
    """Return whether a sampler draws its order from a generator."""
    # The default 0 stands for a missing attribute, because None is a valid generator.
    return isinstance(sampler, Sampler) and isinstance(
        getattr(sampler, "generator", 0), torch.Generator | None
    )


def length_of(batches: Iterable[Any]) -> int | None:
    """Return the number of batches in one iteration, or None if it is unknown."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def rest_of(batches: Iterable[Batch], made: int) -> Iterator[Batch]:
    """Return an iterator over the batches that follow the first `made` ones.

    Parameters
    ----------
    batches : iterable
        A sequence, or a DataLoader of an indexed dataset, is entered in the middle without loading the
        earlier samples. With any other iterable, the first batches are read and dropped.
    made : int
        How many batches to skip.
    """
    if made == 0:
        return iter(batches)
    if isinstance(batches, Sequence):
        return (batches[index] for index in range(made, len(batches)))
    if (
        # A subclass with its own iteration may yield something else than the loader's batches.
        isinstance(batches, DataLoader)
        and type(batches).__iter__ is DataLoader.__iter__
        and not isinstance(batches.dataset, IterableDataset)
    ):
        return iter(_rest_of_loader(batches, made))
    _log.info(
        "%s cannot be entered in the middle, so the %d batches that were already used are read and dropped",
        type(batches).__name__,
        made,
    )
    return islice(iter(batches), made, None)


class _Rest(Sampler[Any]):
    """A sampler that omits the first samples or batches of another sampler."""

    def __init__(self, sampler: Iterable[Any], made: int) -> None:
        self._sampler = sampler
        self._made = made

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._made, None)


def _rest_of_loader(loader: DataLoader[Batch], made: int) -> DataLoader[Batch]:
    """Return a new loader of an epoch's remaining batches."""
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS if hasattr(loader, name)}
    if loader.batch_sampler is None:
        return DataLoader(batch_size=None, sampler=_Rest(loader.sampler, made), **options)
    return DataLoader(batch_sampler=_Rest(loader.batch_sampler, made), **options)


def prefetch(batches: Iterable[Batch], ids: Mapping[Any, Callable[[Batch], Any]]) -> Batches[Batch]:
    """Iterate over batches, and fetch the table rows of each next batch in advance.

    ``for x, y in fleet.prefetch(loader, {model.users: lambda batch: batch[0]}):``

    The rows of the first batch are fetched when they are needed. So are those of a batch that belongs to the
    same step as the previous batch. In sync mode the results are bitwise-identical to those without
    prefetching. In the other modes a batch sees its rows as they were before the previous step.

    Parameters
    ----------
    batches : iterable
        Also the result of `fleet.epochs` or `fleet.steps`.
    ids : mapping of module to callable
        For each `fleet.nn` module, returns the argument of its call for a batch: ids, or the features of a
        collection. A table that the script also reads in other ways is looked up without prefetching.

    Returns
    -------
    iterable
        An object that behaves as `batches` does, apart from iteration.

    Raises
    ------
    ConfigurationError
        A module has no table on the servers; or the ids of a batch are invalid, as when calling the module.
    """
    for module in ids:
        if not callable(getattr(module, "prefetch", None)):
            raise ConfigurationError(
                f"fleet.prefetch: {type(module).__name__} has no rows to fetch; expected modules of fleet.nn"
                ", whose tables are on the parameter servers"
            )
    return Batches(batches, lambda: _one_ahead(batches, ids))


def _one_ahead(batches: Iterable[Batch], ids: Mapping[Any, Callable[[Batch], Any]]) -> Iterator[Batch]:
    end: Any = object()
    for batch, following in pairwise(chain(batches, (end,))):
        if following is not end:
            for module, of in ids.items():
                module.prefetch(of(following))
        yield batch
