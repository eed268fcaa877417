"""Every call of the Fleet API exists on both singletons, with the signature that is documented."""

import inspect

import pytest

from fleet.collective import fleet as collective
from fleet.parameter_server import fleet as parameter_server

PLACE = {
    "init": "(role_maker=None)",
    "is_worker": "()",
    "is_server": "(model_dir=None)",
    "is_first_worker": "()",
    "worker_index": "()",
    "worker_num": "()",
    "worker_endpoints": "(to_string=False)",
    "server_num": "()",
    "server_index": "()",
    "server_endpoints": "(to_string=False)",
    "split_files": "(files)",
    "barrier_worker": "()",
    "all_reduce_worker": "(values, output=None, mode='sum')",
}
TRAINING = {
    "init_server": "(model_dir=None)",
    "run_server": "()",
    "init_worker": "()",
    "stop_worker": "()",
    "distributed_optimizer": "(optimizer, strategy=None, model=None)",
    "minimize": "(loss_fn, startup_program=None, parameter_list=None, no_grad_set=None)",
    "push_parameters": "()",
}
SAVING = {
    "save_persistables": "(executor=None, dirname=None, main_program=None, *, state=None)",
    "load_persistables": "(executor=None, dirname=None, main_program=None)",
    "save_inference_model": (
        "(executor=None, dirname=None, feeded_var_names=(), target_vars=(), main_program=None, *, "
        "table_ids=None)"
    ),
    "export_state_dict": "()",
    "save_check_point": (
        "(executor=None, path=None, train_status=None, main_program=None, fs=None, "
        "remain_all_checkpoint=True, *, incremental=False)"
    ),
    "load_check_point": (
        "(executor=None, path=None, trainer_id=None, main_program=None, fs=None, ignore_empty=True)"
    ),
    "clean_redundant_check_points": "(root_path=None, fs=None, checkpoint_num=1)",
}
LOOPS = {
    "epochs": "(epochs, loader, scheduler=None, *, step_scheduler=None, batches_per_step=1, seed=0)",
    "steps": "(batches, scheduler=None, *, batches_per_step=1, seed=0)",
}
CALLS = PLACE | TRAINING | SAVING | LOOPS


def signature_of(call: object) -> str:
    """Return a signature without its annotations."""
    assert callable(call)
    signature = inspect.signature(call)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "fleet", [pytest.param(parameter_server, id="servers"), pytest.param(collective, id="collective")]
)
def test_the_call_has_its_signature(fleet, name):
    assert signature_of(getattr(fleet, name)) == CALLS[name]


@pytest.mark.parametrize("name", ["main_program", "metrics", "startup_program", "step"])
@pytest.mark.parametrize("kind", [type(parameter_server), type(collective)])
def test_the_property_is_there(kind, name):
    assert isinstance(inspect.getattr_static(kind, name), property)


def test_both_singletons_have_the_same_calls():
    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}

    assert public(type(parameter_server)) == public(type(collective)) == CALLS.keys()
