"""Dispatchers, which assign blocks to servers.

The transpiler calls a dispatcher once, with all parameter blocks of the job in order. A gradient follows its
parameter, so the two always share a server.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

__all__ = ["HashName", "Named", "PSDispatcher", "RoundRobin", "shuffled"]


class Named(Protocol):
    """A block as dispatchers see it: an object with a name."""

    @property
    def name(self) -> str:
        """The block's name, such as ``w.block0``."""


class PSDispatcher(ABC):
    """The base class of dispatchers; assign a subclass to `config.split_method`.

    Parameters
    ----------
    pserver_endpoints : sequence of str
        The servers.

    Notes
    -----
    Paddle's ``fluid.transpiler.ps_dispatcher.PSDispatcher``.
    """

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        """The servers' endpoints."""
        return list(self._eps)

    def reset(self) -> None:
        """Discard the state left by earlier calls of `dispatch`."""
        self._step = 0

    @abstractmethod
    def dispatch(self, varlist: Sequence[Named]) -> list[str]:
        """Return one endpoint per block; the result must be the same in every process of the job.

        Parameters
        ----------
        varlist : sequence
            The blocks, each with a `name`.

        Returns
        -------
        list of str
            One of `eps` for each block.
        """


class RoundRobin(PSDispatcher):
    """A dispatcher that assigns blocks to the servers in turn.

    Notes
    -----
    Paddle's ``fluid.transpiler.RoundRobin``.
    """

    def dispatch(self, varlist: Sequence[Named]) -> list[str]:
        """Return the servers' endpoints in turn, one per block.

        Parameters
        ----------
        varlist : sequence
            The blocks, each with a `name`.

        Returns
        -------
        list of str
            One of `eps` for each block.
        """
        first, self._step = self._step, self._step + len(varlist)
        return [self._eps[(first + position) % len(self._eps)] for position in range(len(varlist))]


class HashName(PSDispatcher):
    """A dispatcher that assigns each block by a hash of its name, so a new parameter moves no other block.

    The hash is CRC-32, which is the same in every process; Python's built-in hash is salted per process.

    Notes
    -----
    Paddle's ``fluid.transpiler.HashName``, which uses Python's built-in hash.
    """

    def dispatch(self, varlist: Sequence[Named]) -> list[str]:
        """Return, for each block, the endpoint selected by the hash of its name.

        Parameters
        ----------
        varlist : sequence
            The blocks, each with a `name`.

        Returns
        -------
        list of str
            One of `eps` for each block.
        """
        return [self._eps[zlib.crc32(variable.name.encode()) % len(self._eps)] for variable in varlist]


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """Return names in the order in which Paddle dispatches whole parameters.

    Parameters
    ----------
    names : sequence of str
        The parameters, sorted.
    seed : int
        The program's `random_seed`.
    """
    found = list(names)
    np.random.RandomState(seed).shuffle(found)  # the generator that gives Paddle's order
    return found
