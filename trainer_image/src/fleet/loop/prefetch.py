"""Batches whose rows of tables are fetched while the batch before is trained on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, TypeVar

from fleet.errors import ConfigurationError
from fleet.loop.batches import Batches

__all__ = ["prefetch"]

Batch = TypeVar("Batch")


def prefetch(batches: Iterable[Batch], ids: Mapping[Any, Callable[[Batch], Any]]) -> Batches[Batch]:
    """Iterate over batches, one ahead: while a batch is trained on, the rows of the next one are fetched.

    ``for x, y in fleet.prefetch(loader, {model.users: lambda batch: batch[0]}):``

    The first batch is looked up when it is needed, as is one of the same step as the batch before.
    In sync mode the training is the same to the bit. In the others a batch's rows are those from before the
    step that it follows.

    Parameters
    ----------
    batches : iterable
        What `fleet.epochs` and `fleet.steps` yield is, too.
    ids : mapping of module to callable
        By `fleet.nn` module, what it is called with for a batch: ids, or of a collection the features. A
        table that is read otherwise as well is looked up as if it were not here.

    Returns
    -------
    iterable
        In all else it is as `batches`.

    Raises
    ------
    ConfigurationError
        A module has no table on the servers; or, of a batch's ids, as when the module is called.
    """
    for module in ids:
        if not callable(getattr(module, "prefetch", None)):
            raise ConfigurationError(
                f"fleet.prefetch: {type(module).__name__} has no rows to fetch; expected modules of fleet.nn"
                ", whose tables are on the parameter servers"
            )
    return Batches(batches, lambda: _one_ahead(batches, ids))


def _one_ahead(batches: Iterable[Batch], ids: Mapping[Any, Callable[[Batch], Any]]) -> Iterator[Batch]:
    ended: Any = object()
    for batch, following in pairwise(chain(batches, (ended,))):
        if following is not ended:
            for module, of in ids.items():
                module.prefetch(of(following))
        yield batch
