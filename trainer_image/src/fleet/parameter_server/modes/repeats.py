"""Gradients that come again in the sync mode: a trainer that was restarted makes its last step once more."""

from collections.abc import Sequence

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes.interface import Answer
from fleet.parameter_server.modes.rounds import Rounds
from fleet.parameter_server.shard import Shard

__all__ = ["Repeats"]


class Repeats:
    """Tells what came before from what nobody can have sent. Who calls holds the lock of the rounds.

    Parameters
    ----------
    shard : Shard
    rounds : Rounds
    """

    def __init__(self, shard: Shard, rounds: Rounds) -> None:
        self._blocks = shard.blocks
        self._rounds = rounds

    def drop(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Pass over a gradient that came before, in an earlier life of its trainer.

        Raises
        ------
        RemoteProtocolError
            It did not.
        """
        round_ = self._rounds.of[block]
        self.check(trainer, block, step)
        if step < round_.step:  # applied, or stepped without it
            return [Answer(block, round_.step, (trainer,))]
        if step == round_.step and trainer in round_.again:
            round_.again.remove(trainer)
            return []
        raise RemoteProtocolError(
            f"trainer {trainer} sent a gradient of {self._blocks[block].name} for step {step}, "
            f"expected {'the next step' if step == round_.step else f'step {round_.step}'}"
        )

    def check(self, trainer: int, block: int, step: int) -> None:
        """Refuse what is older than a step: nobody steps a block twice without a trainer that takes part."""
        if step < (now := self._rounds.of[block].step) - 1:
            raise RemoteProtocolError(
                f"trainer {trainer} is at step {step} of {self._blocks[block].name}, expected step "
                f"{now} or {now - 1}: values were loaded after this trainer joined; load on every trainer "
                "before its first step, or on the servers: fleet.init_server(model_dir)"
            )
