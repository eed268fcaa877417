"""The hyper-parameters of a step, on which all trainers must agree in the sync mode."""

from collections.abc import Collection

from fleet.errors import ConfigurationError
from fleet.wire import NO_STEP, HyperParameters

__all__ = ["AgreedHyper"]


class AgreedHyper:
    """What trainers have said of the steps that are not over. Who calls holds the lock."""

    def __init__(self) -> None:
        self._said: dict[int, dict[int, HyperParameters]] = {}

    def say(self, trainer: int, step: int, hyper_parameters: HyperParameters, lowest_step: int) -> None:
        """Take the hyper-parameters of a trainer's step, and forget those of steps that are over.

        Raises
        ------
        ConfigurationError
            Another trainer has other ones in this step.
        """
        for over in [known for known in self._said if known < lowest_step]:
            del self._said[over]
        said = self._said.setdefault(step, {})
        said.pop(trainer, None)  # of an earlier life
        first = next((each for each, known in said.items() if known != NO_STEP), trainer)
        agreed = said.get(first, hyper_parameters)
        said[trainer] = hyper_parameters
        if hyper_parameters not in (NO_STEP, agreed):
            raise ConfigurationError(
                f"step {step}: trainer {trainer} has other hyper-parameters than trainer {first}: "
                f"{_difference(hyper_parameters, agreed)}; in sync mode a schedule must not depend on the "
                "trainer's own data, and a restarted trainer brings it to where the others' is: "
                "fleet.epochs(n, loader, scheduler) does"
            )

    def of(self, step: int, trainers: Collection[int]) -> HyperParameters:
        """Return those of a step to which these trainers have given gradients.

        `NO_STEP` where there is none, and where one trainer has none, as its gradients are not finite: then
        nobody steps. So it would be in one process, in which the sum is not finite.
        """
        said = self._said.get(step, {})
        return said[min(trainers)] if trainers and NO_STEP not in said.values() else NO_STEP


def _difference(found: HyperParameters, expected: HyperParameters) -> str:
    if len(found) != len(expected):
        return f"{len(found)} param groups instead of {len(expected)}"
    return ", ".join(
        f"{name}={ours.get(name)} instead of {name}={theirs.get(name)} in param group {group}"
        for group, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
