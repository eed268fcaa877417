"""Strategy options that replace the exact averaging of gradients in collective training."""

from dataclasses import dataclass

from fleet.errors import ConfigurationError

__all__ = ["LocalSGD", "PowerSGD"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD:
    """Local SGD: trainers step independently and average their parameters at intervals.

    Attributes
    ----------
    k_steps : int
        The interval in steps.
    begin_step : int
        The step from which the interval counts; parameters are averaged after every earlier step.

    Raises
    ------
    ConfigurationError
        A value is not a whole number of at least 1.

    Notes
    -----
    Stich 2019, arXiv:1805.09767; with `begin_step`, Lin et al. 2020 (post-local SGD), arXiv:1808.07217.
    """

    k_steps: int = 1
    begin_step: int = 1

    def __post_init__(self) -> None:
        for name in ("k_steps", "begin_step"):
            _check_whole(f"LocalSGD.{name}", getattr(self, name), 1)

    def is_due(self, step: int) -> bool:
        """Return whether the parameters are averaged after the given step.

        Parameters
        ----------
        step : int
            Counted from 1.

        Returns
        -------
        bool
            True if this step ends with an average.
        """
        return step < self.begin_step or step % self.k_steps == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGD:
    """PowerSGD: compresses gradient matrices to products of two narrow matrices, with error feedback.

    Attributes
    ----------
    matrix_rank : int
        The rank of the narrow matrices.
    start_step : int
        Gradients are not compressed before this step, while they change fast.

    Raises
    ------
    ConfigurationError
        A value is not a whole number, or too small.

    Notes
    -----
    As in torch: Vogels et al. 2019, arXiv:1905.13727.
    """

    matrix_rank: int = 1
    start_step: int = 1000

    def __post_init__(self) -> None:
        _check_whole("PowerSGD.matrix_rank", self.matrix_rank, 1)
        _check_whole("PowerSGD.start_step", self.start_step, 2)


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}; expected a whole number of at least {least}")
