"""Programs of collective training, run by executors: what they learn is what one process learns."""

import pytest
import torch

from tests.support.documents import block

BEGIN = """
import fleet
rank, endpoints = int(os.environ["RANK"]), os.environ["PADDLE_TRAINER_ENDPOINTS"]

def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def captured(seed, optimizer=momentum):
    model = build(seed)

    def loss_fn(model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y)

    return model, fleet.Program.capture(model, loss_fn, optimizer(model.parameters()))

def feed(step, ranks):
    shares = [batch(step, each) for each in ranks]
    return dict(zip("xy", (torch.cat(columns) for columns in zip(*shares))))

"""

PROGRAMS = """
model, main = captured(seed=rank)
transpiler = fleet.DistributeTranspiler(fleet.DistributeTranspilerConfig(mode=MODE))
mine = endpoints.split(",")[rank]
transpiler.transpile(rank, trainers=endpoints, current_endpoint=mine)
executor = fleet.Executor(fleet.CPUPlace())
executor.run(fleet.default_startup_program())
if MODE == "nccl2":
    stepping = fleet.ParallelExecutor(use_cuda=False, loss_name="loss", num_trainers=2, trainer_id=rank)
    step = lambda number: stepping.run(["loss"], feed(number, [rank]))
else:
    program = transpiler.get_trainer_program()
    step = lambda number: executor.run(program, feed=feed(number, [rank]), fetch_list=["loss"])
losses = [float(step(number)[0]) for number in range(4)]
executor.close()
"""

LEARNED = """
alone, program = captured(seed=0)
one = fleet.Executor(fleet.CPUPlace())
for number in range(4):
    one.run(program, feed=feed(number, range(2)), fetch_list=["loss"])
for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found.cpu(), expected)
"""


@pytest.mark.parametrize("mode", ["nccl2", "collective"])
def test_two_trainers_learn_what_one_process_learns(trainers, mode):
    for process in trainers(BEGIN + PROGRAMS.replace("MODE", repr(mode)) + LEARNED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


SHOWN = """
model, main = captured(seed=rank)
trainer_id, (x, y) = rank, batch(0, rank)
CODE
"""

ONCE = LEARNED.replace("range(4)", "range(1)")


def test_the_program_of_the_page_about_paddle_is_run(trainers):
    code = block("docs/paddle.md", "Programs of collective training")
    code = code.replace('"10.0.0.1:6170,10.0.0.2:6170"', "endpoints")
    code = code.replace('"10.0.0.1:6170"', "endpoints.split(',')[rank]")
    assert "10.0.0" not in code
    for process in trainers(BEGIN + SHOWN.replace("CODE", code) + ONCE):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


MINIMIZED = """
from fleet.collective import fleet as together
together.init()
model = build(seed=rank)
together.distributed_optimizer(momentum(model.parameters()), model=model)
together.minimize(lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y))
executor = fleet.Executor(fleet.CPUPlace())
executor.run(together.startup_program)
for number in range(4):
    executor.run(together.main_program, feed=feed(number, [rank]), fetch_list=["loss"])
executor.close()
together.stop_worker()
"""


def test_two_trainers_of_a_program_that_is_minimized_learn_it_too(trainers):
    for process in trainers(BEGIN + MINIMIZED + LEARNED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


LOCAL = """
def adam(parameters):  # for which averages of gradients would come to something else
    return torch.optim.Adam(parameters, lr=0.05)

model, main = captured(seed=rank, optimizer=adam)
config = fleet.DistributeTranspilerConfig(mode="collective", collective_mode="local_sgd")
transpiler = fleet.DistributeTranspiler(config)
transpiler.transpile(rank, trainers=endpoints, current_endpoint=endpoints.split(",")[rank])
executor = fleet.Executor(fleet.CPUPlace())
executor.run(fleet.default_startup_program())
for number in range(4):
    executor.run(transpiler.get_trainer_program(), feed=feed(number, [rank]), fetch_list=["loss"])
executor.close()

alone = [captured(seed=0, optimizer=adam) for _ in range(2)]
one = fleet.Executor(fleet.CPUPlace())
for number in range(4):
    for each, (_, program) in enumerate(alone):
        one.run(program, feed=feed(number, [each]), fetch_list=["loss"])
    with torch.no_grad():
        for values in zip(*(other.parameters() for other, _ in alone)):
            mean = values[0] / 2 + values[1] / 2
            for value in values:
                value.copy_(mean)
assert all(torch.equal(*pair) for pair in zip(model.parameters(), alone[rank][0].parameters(), strict=True))
"""


def test_local_sgd_of_the_config_averages_parameters_after_every_step(trainers):
    for process in trainers(BEGIN + LOCAL):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")
@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(PROGRAMS.replace("MODE", "'nccl2'"), id="nccl2"),
        pytest.param(PROGRAMS.replace("MODE", "'collective'"), id="collective"),
        pytest.param(MINIMIZED, id="minimized"),
    ],
)
def test_two_trainers_that_share_a_gpu_learn_it_too(trainers, programs):
    on_one_gpu = 'os.environ |= {"LOCAL_RANK": os.environ["RANK"], "CUDA_VISIBLE_DEVICES": "0"}\n'
    programs = programs.replace("CPUPlace()", "CUDAPlace(0)").replace("use_cuda=False", "use_cuda=True")
    for process in trainers(on_one_gpu + BEGIN + programs + LEARNED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
