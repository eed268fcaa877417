"""The calls of `fleet` that follow from the role alone."""

from collections.abc import Sequence
from typing import Literal, overload

from fleet.errors import ConfigurationError
from fleet.process import lifecycle
from fleet.role_maker import File, Role, RoleMaker, share_of_files

__all__ = ["RoleCalls"]

_OTHER_FLEET = {
    False: (
        "fleet.parameter_server was given the role of a collective job; expected "
        "PaddleCloudRoleMaker() without is_collective, or the fleet of fleet.collective"
    ),
    True: (
        "fleet.collective was given the role of a job with parameter servers; expected "
        "PaddleCloudRoleMaker(is_collective=True), or the fleet of fleet.parameter_server"
    ),
}


class RoleCalls:
    """The place of this process in a job; `_role` is set by ``init``."""

    def __init__(self) -> None:
        self._role: Role | None = None

    def is_worker(self) -> bool:
        """Whether this process trains; in a collective job every process does.

        Returns
        -------
        bool
            True of a trainer.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().is_worker

    def is_first_worker(self) -> bool:
        """Whether this process is trainer 0, which acts for all where one must.

        Returns
        -------
        bool
            True of trainer 0.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().is_first_worker

    def worker_index(self) -> int:
        """Return this trainer's index; in a collective job its rank.

        Returns
        -------
        int
            From 0 on.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().index

    def worker_num(self) -> int:
        """Return the number of trainers.

        Returns
        -------
        int
            At least 1.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().worker_num

    @overload
    def worker_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def worker_endpoints(self, to_string: Literal[True]) -> str: ...
    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return every trainer's host:port, as a list or comma separated.

        Beside parameter servers there is none, as trainers do not listen there.

        Parameters
        ----------
        to_string : bool
            Return one text, comma separated, in place of a list.

        Returns
        -------
        list of str, or str
            As host:port.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return _listed(self._started_role().worker_endpoints, to_string)

    def server_num(self) -> int:
        """Return the number of parameter servers: 0 in a collective job.

        Returns
        -------
        int
            At least 1 beside parameter servers.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().server_num

    @overload
    def server_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def server_endpoints(self, to_string: Literal[True]) -> str: ...
    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return every server's host:port, as a list or comma separated: none in a collective job.

        Parameters
        ----------
        to_string : bool
            Return one text, comma separated, in place of a list.

        Returns
        -------
        list of str, or str
            As host:port.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return _listed(self._started_role().server_endpoints, to_string)

    def split_files(self, files: Sequence[File]) -> list[File]:
        """Return this trainer's share: contiguous blocks, what remains goes to the lowest indexes.

        Parameters
        ----------
        files : sequence of str or path
            The same on every trainer, in the same order.

        Returns
        -------
        list of str or path
            May be empty, where there are fewer files than trainers.

        Raises
        ------
        ConfigurationError
            `files` is no list of names, this process is a parameter server, or ``fleet.init`` was not called.
        """
        role = self._started_role()
        if not role.is_worker:
            raise ConfigurationError(
                "fleet.split_files: a parameter server reads no files; expected a trainer"
            )
        return share_of_files(files, role.index, role.worker_num)

    def _find_role(self, role_maker: RoleMaker, *, collective: bool) -> Role:
        """Return the role that ``init`` is to take; ConfigurationError if it is the other fleet's.

        Mistakes from here on end the process as a replica's do, though nobody knows yet which it is.
        """
        lifecycle.start(None)
        if self._role is not None:
            raise ConfigurationError("fleet.init was called a second time; expected once per process")
        role = role_maker.generate_role()
        if role.is_collective != collective:
            raise ConfigurationError(_OTHER_FLEET[collective])
        return role

    def _checkpoint_root(self) -> str | None:
        return self._started_role().checkpoint_dir

    def _started_role(self) -> Role:
        if self._role is None:
            raise ConfigurationError("fleet.init was not called; expected it before anything else of fleet")
        return self._role


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
