"""Whether gradients may leave during the backward pass: told by the strategy, or learnt in the first rounds.

Many a script does something to gradients between a backward pass and ``step()``: it clips them, unscales
them, or adds up several backward passes. So in the first rounds all of them leave in ``step()``, and what the
script has done until then tells whether they may leave earlier from then on.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch.nn import Parameter

from fleet.parameter_server.trainer.marks import Recorder, SentGradient, covers_all
from fleet.wire import HyperParameters

__all__ = ["NO_OVERLAP", "Overlap"]

NO_OVERLAP: Final = "DistributedStrategy(overlap=False), with which everything is sent in optimizer.step()"
_log = logging.getLogger(__name__)


class Overlap:
    """Decides whether a gradient leaves as soon as the backward pass has produced it.

    Parameters
    ----------
    wanted : bool or None
        As the strategy says; None: learn it.
    recorder : Recorder
    """

    def __init__(self, wanted: bool | None, recorder: Recorder) -> None:
        self.is_on = wanted is not False
        """Whether gradients may leave early, or it is still to be learnt."""
        self._learns = wanted is None
        self._paused = False
        self.recorder = recorder
        """Describes gradients."""
        self._seen: dict[str, SentGradient] = {}
        """What the step in progress would have sent by now, while rounds are watched."""
        self._seen_hyper: HyperParameters | None = None

    @property
    def listens(self) -> bool:
        """Whether a gradient that a backward pass has accumulated is looked at before ``step()``."""
        return self.is_on and not self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes accumulate, without sending."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def watches(self) -> bool:
        """Whether it is to be learnt what the script does between a backward pass and the step."""
        return self._learns and self.is_on and covers_all(self.recorder.round)

    @property
    def has_seen(self) -> bool:
        """Whether gradients would have left by now in the step in progress."""
        return bool(self._seen)

    def see(self, name: str, parameter: Parameter, hyper: HyperParameters) -> None:
        """Note what would have left now."""
        gradient = parameter.grad
        if name in self._seen:
            self.turn_off(f"a second backward() of a step reached {name}")
        elif gradient is not None and gradient.layout is torch.strided:
            self._seen[name] = self.recorder.record(name, gradient, marked=True)
            if self._seen_hyper is None:
                self._seen_hyper = hyper

    def look_back(self, parameters: Mapping[str, Parameter], hyper: HyperParameters, *, scaled: bool) -> None:
        """Learn from a watched step whether gradients might have left the moment they existed.

        Parameters
        ----------
        parameters : mapping of name to Parameter
        hyper : tuple of mappings
            The hyper-parameters that the step is made with.
        scaled : bool
            Whether a gradient scaler is at work.
        """
        if not self.watches:
            return
        if scaled:
            self.turn_off("a gradient scaler is at work")
        elif self._seen_hyper not in (None, hyper):
            self.turn_off("hyper-parameters were changed between backward() and step()")
        for name, seen in self._seen.items():
            if parameters[name].grad is not seen.gradient or not seen.unchanged:
                self.turn_off(f"the gradient of {name} was changed between backward() and step()")
                break
        self._seen, self._seen_hyper = {}, None

    def turn_off(self, because: str) -> None:
        """Let gradients leave in ``step()`` from now on."""
        self.is_on = False
        self._seen, self._seen_hyper = {}, None
        _log.info(
            "gradients leave in optimizer.step(), and not during the backward pass, for %s; "
            "DistributedStrategy(overlap=False) says so from the beginning",
            because,
        )
