"""GEO: local steps, what is sent of them, and what arrives in between."""

import pytest
import torch

from fleet.errors import ConfigurationError, DeadlineExceededError
from fleet.parameter_server.modes import Answer, Geo
from tests.support.modes import OneServer, ScriptedSession


class Trainer:
    """Trainer 0 of two that pushes every 2 steps; a local step adds to a parameter."""

    def __init__(self, push_nums: int = 2) -> None:
        mode = Geo(push_nums)
        self.session = ScriptedSession(mode)
        self.mode = mode.make_trainer(self.session)
        self.mode.start()

    def step(self, change: float) -> None:
        with torch.no_grad():
            for parameter in self.session.parameters.values():
                parameter.add_(change)
        self.mode.finish(())

    def settle(self) -> None:
        self.mode.settle()

    @property
    def values(self) -> dict[str, float]:
        return {name: float(value.detach().flatten()[0]) for name, value in self.session.parameters.items()}


def test_the_servers_add_what_comes_and_answer_with_the_sum():
    server = OneServer(Geo(2), 2)
    for trainer in range(2):
        server.begin(trainer, 1, ())
    assert server.send(1, 0, 0.5, step=1) == [Answer(0, 2, (1,))]
    assert server.send(0, 0, 0.25, step=1) == [Answer(0, 2, (0,))]
    assert (server.value(0), server.sent(1, 0), server.sent(0, 0)) == (0.75, 0.75, 0.75)


def test_what_has_changed_is_sent_every_so_many_steps_divided_by_the_trainers():
    trainer = Trainer()
    trainer.step(1.0)
    assert trainer.session.sent == []
    trainer.step(3.0)
    assert trainer.session.sent == [(1, (), {0: [2.0], 1: [2.0] * 4})]
    assert trainer.values == {"b": 4.0, "w": 4.0}
    assert trainer.session.step == 2


def test_what_the_others_changed_is_added_to_what_local_steps_made_meanwhile():
    trainer = Trainer()
    trainer.step(1.0)
    trainer.step(3.0)  # sent 2: the servers and this trainer agree on 2 of its 4
    trainer.session.land({"b": 12.0, "w": 2.0})  # 10 by another trainer in b, nothing in w
    trainer.step(1.0)
    assert trainer.values == {"b": 15.0, "w": 5.0}
    trainer.step(1.0)  # 16 - 12 and 6 - 2 are not agreed on yet
    assert trainer.session.sent[1] == (3, (), {0: [2.0], 1: [2.0] * 4})


def test_values_that_are_late_are_adopted_when_they_are_there():
    trainer = Trainer(push_nums=3)
    for _ in range(3):
        trainer.step(2.0)
    trainer.step(1.0)
    assert trainer.values["b"] == 7.0  # nothing has arrived
    trainer.session.land({"b": 4.0, "w": 3.0})  # 3 were agreed on
    trainer.step(0.0)
    assert trainer.values == {"b": 8.0, "w": 7.0}


def test_a_push_waits_for_the_answer_to_the_one_before():
    trainer = Trainer(push_nums=1)
    trainer.step(1.0)
    with pytest.raises(AssertionError, match="waits for values"):
        trainer.step(1.0)


def test_at_the_end_the_rest_is_sent_and_the_servers_values_stay():
    trainer = Trainer()
    for _ in range(3):
        trainer.step(2.0)
        trainer.session.land({"b": 2.0, "w": 2.0})
    trainer.session.at_once = {"b": 7.0, "w": 9.0}
    trainer.mode.stop()
    assert trainer.session.ends == 1, "what the others still send belongs to the last values"
    # After 2 steps 4, of which 2 were agreed on; the third's 2 and the other half of the 4 are left.
    assert trainer.session.sent[1] == (2, (), {0: [2.0], 1: [2.0] * 4})
    assert trainer.values == {"b": 7.0, "w": 9.0}


def test_what_a_save_needs_is_sent_once_and_steps_go_on_from_the_answer():
    trainer = Trainer()
    trainer.step(2.0)
    trainer.session.at_once = {"b": 11.0, "w": 1.0}  # 10 by another trainer in b, nothing in w
    trainer.settle()
    assert trainer.session.sent == [(0, (), {0: [1.0], 1: [1.0] * 4})]
    assert trainer.values == {"b": 12.0, "w": 2.0}
    trainer.settle()
    assert len(trainer.session.sent) == 1
    trainer.step(2.0)
    assert trainer.session.sent[1] == (1, (), {0: [1.5], 1: [1.5] * 4})  # half of 14 - 11
    trainer.session.at_once = None
    trainer.session.land({"b": 12.5, "w": 2.5})
    trainer.settle()
    assert len(trainer.session.sent) == 2
    assert trainer.values == {"b": 14.0, "w": 4.0}


def test_at_the_end_right_after_a_push_the_values_are_asked_for():
    trainer = Trainer()
    for _ in range(2):
        trainer.step(2.0)
    trainer.session.at_once = {"b": 7.0, "w": 9.0}
    trainer.mode.stop()
    assert (len(trainer.session.sent), trainer.session.requests) == (1, 1)
    assert trainer.values == {"b": 7.0, "w": 9.0}


def test_who_has_waited_too_long_for_the_others_ends_with_the_present_values_and_says_so(monkeypatch, caplog):
    trainer = Trainer()
    trainer.step(2.0)
    trainer.session.at_once = {"b": 7.0, "w": 9.0}

    def wait_for_ends() -> None:
        raise DeadlineExceededError("the end of the training waited 1800 s for trainer 1")

    monkeypatch.setattr(trainer.session, "wait_for_ends", wait_for_ends)
    trainer.mode.stop()
    assert trainer.values == {"b": 7.0, "w": 9.0}
    assert "waited 1800 s for trainer 1: this trainer ends with the current values" in caplog.text


def test_at_the_start_it_says_how_often_trainers_hear_of_each_other(caplog):
    caplog.set_level("INFO", "fleet")
    Trainer(push_nums=100)
    assert "every 100 steps (config.geo_sgd_need_push_nums)" in caplog.text
    assert "a trainer that makes fewer steps exchanges nothing before it ends" in caplog.text


def test_never_pushing_is_refused():
    with pytest.raises(ConfigurationError, match=r"Geo\.push_nums is 0; expected at least 1"):
        Geo(0)
