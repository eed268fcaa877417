"""Where each trainer stands in a mode without a barrier."""

from fleet.parameter_server.modes.trainer_steps import TrainerSteps
from fleet.parameter_server.store import Origin


def send(steps, trainer, step, parts=(7, 8)):
    for part in parts:
        steps.advance(trainer, part, step)


def test_a_trainer_makes_the_step_after_its_last_that_is_wholly_here():
    steps = TrainerSteps((7, 8), 2)
    send(steps, 0, 0)
    send(steps, 0, 1, parts=(8,))
    assert (steps.of(0), steps.of(1), steps.ahead) == (1, 0, 1)
    assert steps.parts(0) == {7: 1, 8: 2}
    assert not steps.is_due(0, 8, 1)
    assert steps.is_due(0, 7, 1)


def test_one_that_comes_back_stands_where_it_stood():
    steps = TrainerSteps((7, 8), 1)
    send(steps, 0, 0)
    steps.hyper[0] = ({"lr": 0.1},)
    assert not steps.admit(0, 3)
    assert steps.of(0) == 1
    assert steps.hyper[0] == ({"lr": 0.1},)
    assert steps.origin(0, 1) == Origin(0, 3, 1)


def test_one_that_comes_late_shares_in_what_is_left_to_do():
    steps = TrainerSteps((7, 8), 1)
    send(steps, 0, 4)
    assert steps.admit(1, 0)
    assert steps.of(1) == steps.of(0) == 5
    # Another server has seen it come earlier: what it sends of step 2 is due here all the same.
    assert steps.is_due(1, 7, 2)
    assert steps.hyper[1] == ()


def test_all_go_on_at_the_step_of_a_checkpoint_also_those_that_come_late():
    steps = TrainerSteps((7, 8), 2)
    steps.resume(6)
    assert (steps.of(0), steps.of(1)) == (6, 6)
    steps.resume_each({0: 3, 2: 9})
    steps.admit(2, 0)
    steps.admit(3, 0)
    assert [steps.of(trainer) for trainer in range(4)] == [3, 6, 9, 9]


def test_a_server_that_holds_no_part_of_it_has_made_no_step():
    steps = TrainerSteps((), 2)
    assert (steps.of(0), steps.ahead) == (0, 0)
    assert TrainerSteps((7,), 0).ahead == 0
