from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.api import parse_job
from fleet_operator.build import overwritten_sentence
from tests.support.local import job_manifest


def env(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": "3"} for name in names]


@pytest.mark.parametrize(
    ("server", "names", "fields"),
    [
        pytest.param(
            None, ["EPOCHS", "RANK"], ["trainer.template.spec.containers[0].env[1] (RANK)"], id="rank"
        ),
        pytest.param("", ["RANK", "OMP_NUM_THREADS", "FLEET_HEARTBEAT_SECONDS"], [], id="none-of-this-mode"),
        pytest.param(
            "",
            ["PADDLE_TRAINER_ID", "POD_IP"],
            [
                "pserver.template.spec.containers[0].env[1] (POD_IP)",
                "trainer.template.spec.containers[0].env[0] (PADDLE_TRAINER_ID)",
                "trainer.template.spec.containers[0].env[1] (POD_IP)",
            ],
            id="only-in-the-role-that-gets-it",
        ),
    ],
)
def test_what_a_template_sets_in_vain_is_named_by_its_field(server, names, fields):
    sentence = overwritten_sentence(parse_job(job_manifest("", server=server, env=env(*names))))
    told = None if sentence is None else sentence.partition(": ")[0]
    assert told == (", ".join(f"spec.{field}" for field in fields) or None)


def test_a_shared_template_is_told_once_and_every_container_is_looked_at():
    document = job_manifest("", env=env("PADDLE_PSERVER_ID", "PADDLE_TRAINERS"))
    template = document["spec"]["trainer"].pop("template")
    del document["spec"]["pserver"]["template"]
    template["spec"]["initContainers"] = [{"name": "data", "image": "none", "env": env("POD_IP")}]
    document["spec"]["template"] = template
    told = overwritten_sentence(parse_job(document))
    assert told is not None
    assert told.partition(": ")[0].split(", ") == [
        "spec.template.spec.initContainers[0].env[0] (POD_IP)",
        "spec.template.spec.containers[0].env[0] (PADDLE_PSERVER_ID)",
        "spec.template.spec.containers[0].env[1] (PADDLE_TRAINERS)",
    ]
