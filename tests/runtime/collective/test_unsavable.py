"""What fleet will not be able to save or export is said before the training, which goes on."""

OTHER_MODULE = """
fleet.init()
model, criterion = build(seed=0), torch.nn.PReLU()
parameters = [*model.parameters(), *criterion.parameters()]
optimizer = fleet.distributed_optimizer(torch.optim.SGD(parameters, lr=0.1), model=model)
print("it begins", file=sys.stderr, flush=True)
criterion(model(batch(0, 0)[0])).sum().backward()
optimizer.step()
fleet.stop_worker()
"""

TWO_MODELS = """
fleet.init()
first, second = build(seed=0), build(seed=1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
print("it begins", file=sys.stderr, flush=True)
fleet.stop_worker()
"""

NAMED = """
fleet.init()
model = build(seed=0)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
print("it begins", file=sys.stderr, flush=True)
fleet.stop_worker()
"""


def said_before_training(trainers, body: str) -> str:
    (only,) = trainers(body, ranks=(0,), size=1)
    err: str = only.communicate(timeout=60)[1]
    assert only.returncode == 0, err
    return err.partition("it begins")[0]


def test_a_parameter_of_another_module_is_said_to_make_every_save_fail(trainers):
    said = said_before_training(trainers, OTHER_MODULE)
    assert "fleet cannot save, load or export the parameters of this optimizer" in said
    assert "parameter 4 of the optimizer's param group 0, of shape [1], is not one of the model's" in said


def test_parameters_without_names_are_said_to_make_exports_fail(trainers):
    said = said_before_training(trainers, TWO_MODELS)
    assert "parameters are named by position in the optimizer (param_0_0, …)" in said
    assert "fleet.export_state_dict and save_inference_model fail" in said


def test_nothing_is_said_of_a_model_that_can_be_saved(trainers):
    said = said_before_training(trainers, NAMED)
    assert "save" not in said
    assert "param_0_0" not in said
