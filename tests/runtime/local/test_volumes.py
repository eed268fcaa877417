"""Manifests of a cluster on this machine, with folders and files in the place of its volumes and Secrets."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.local import LocalRun, job_manifest

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]

PAGE = Path(__file__).parents[3] / "docs" / "local.md"


def test_the_manifest_and_the_command_of_the_page(tmp_path):
    section = PAGE.read_text().partition("## One manifest for both places\n")[2].partition("\n## ")[0]
    [manifest], [command] = (re.findall(rf"```{kind}\n(.*?)```", section, re.S) for kind in ("yaml", "bash"))
    folder = tmp_path / "run"
    (folder / "mnist").mkdir(parents=True)
    (folder / "mnist" / "images").write_text("digits")
    (folder / "train.yaml").write_text("epochs: 2")
    (folder / "tracker.env").write_text("TRACKER_TOKEN=secret\n")
    (folder / "train.py").write_text(
        "import os, sys\n"
        "data, config = (word.partition('=')[2] for word in sys.argv[1:])\n"
        "print(open(f'{data}/images').read(), open(config).read(), os.environ['TRACKER_TOKEN'])\n"
    )
    program, verb, dash_f, _, *options = shlex.split(command)
    assert [program, verb, dash_f] == ["fleetjob", "run", "-f"]
    with LocalRun(folder, yaml.safe_load(manifest), options=("-o", "json", *options)) as run:
        assert run.wait() == 0, run.stderr
        assert f"volumes: /data is {folder}/mnist, /config is {folder}\n" in run.stderr
        assert "image, volumeMounts.readOnly\n" in run.stderr
        for index in (0, 1):
            assert run.log(f"trainer-{index}").splitlines()[1:] == ["digits epochs: 2 secret"]


def test_an_empty_dir_is_each_pods_own_and_fresh_in_each_life(tmp_path):
    script = (
        "import os, pathlib\n"
        "for name in ('SCRATCH', 'KEPT'):\n"
        "    folder = pathlib.Path(os.environ[name])\n"
        "    print(name, len(list(folder.iterdir())), flush=True)\n"
        "    (folder / 'used').touch()\n"
        "if os.environ['FLEET_RESTARTS'] == '0':\n"
        "    raise SystemExit(1)\n"
        "pathlib.Path('done-' + os.environ['PADDLE_TRAINER_ID']).touch()\n"
        "if len(list(pathlib.Path().glob('done-*'))) == 2:\n"
        "    pathlib.Path('done').touch()\n"
    )
    env = [{"name": "SCRATCH", "value": "/scratch"}, {"name": "KEPT", "value": "/kept"}]
    job = job_manifest(script, trainers=2, env=env)
    pod_spec = job["spec"]["trainer"]["template"]["spec"]
    pod_spec["volumes"] = [{"name": "scratch", "emptyDir": {}}, {"name": "kept", "emptyDir": {}}]
    pod_spec["containers"][0]["volumeMounts"] = [
        {"name": name, "mountPath": f"/{name}"} for name in ("scratch", "kept")
    ]
    with LocalRun(tmp_path / "run", job, options=("-o", "json", "--volume", f"kept={tmp_path}/kept")) as run:
        assert run.wait() == 0, run.stderr
        for index in (0, 1):
            said = [line for line in run.log(f"trainer-{index}").splitlines() if not line.startswith("===")]
            assert said == ["SCRATCH 0", "KEPT 0", "SCRATCH 0", "KEPT 1"]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["trainer-0", "trainer-1"]


def test_a_volume_that_nothing_stands_for_and_a_path_that_nothing_tells_start_nothing(tmp_path):
    job = job_manifest("open('/data/x')", server=None)
    pod_spec = job["spec"]["trainer"]["template"]["spec"]
    pod_spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    pod_spec["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    with LocalRun(tmp_path / "one", job) as run:
        assert run.wait() == 2
        assert "volumes[0].persistentVolumeClaim: found data, expected a folder on this machine" in run.stderr
        assert "--volume data=FOLDER" in run.stderr
    pod_spec["containers"][0]["command"] = ["python", "-c", "from train import main; main()"]
    with LocalRun(tmp_path / "two", job, options=("-o", "json", "--volume", "data=.")) as run:
        assert run.wait() == 2
        assert "containers[0].volumeMounts[0].mountPath: found /data, expected a path that" in run.stderr
        assert not run.logs.exists()
