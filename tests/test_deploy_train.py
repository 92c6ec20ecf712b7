"""The files of deploy/ that start trainings: they parse, name what hone needs, and their commands are hone's."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hone.cli.options import fields, parse
from hone.cli.stages import OF_TRAIN
from hone.train.stage import Train
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"


def check_command(words: list[str]) -> dict[str, str]:
    """`words` after `hone` are a training that hone would accept; its options."""
    given, options = parse(words)
    assert given[0] == "train" and len(given) == 2 and options["out"] and options["device"] == "cuda"
    Train.from_overrides(fields(options, *OF_TRAIN))
    return options


def test_the_jobset_starts_a_training_on_every_host():
    made = yaml.safe_load((DEPLOY / "train-jobset.yaml").read_text())
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, (job,) = made["metadata"]["name"], made["spec"]["replicatedJobs"]
    hosts, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert hosts["completionMode"] == "Indexed" and hosts["parallelism"] == hosts["completions"] == int(env["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["GPUS"])
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= {*env}
    (script,) = container["args"]
    words = shlex.split(script)
    launched, command = words[1 : words.index("hone")], words[words.index("hone") + 1 :]
    assert words[:2] == ["exec", "torchrun"] and launched[-1] == "-m"
    leader = next(word for word in launched if word.startswith("--master-addr="))
    assert leader == f"--master-addr={name}-{job['name']}-0-0.{made['spec']['network']['subdomain']}"
    port = next(word for word in launched if word.startswith("--master-port="))
    assert port == f"--master-port={container['ports'][0]['containerPort']}"
    check_command(command)
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert {one["name"] for one in pod["volumes"]} == {*mounts} and mounts["shm"] == "/dev/shm"
    assert all(word.startswith(mounts["shared"]) for word in (parse(command)[0][1], parse(command)[1]["out"]))


@pytest.mark.parametrize("code", [0, 143, 2])
def test_the_slurm_job_gives_each_task_a_rank(code, tmp_path):
    """With stand-ins for Slurm's commands: srun runs one task, which says what hone would get."""
    bash = shutil.which("bash")
    assert bash is not None
    stand_ins = {
        "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> requeued; fi\n',
        "srun": '#!/bin/bash\nshift\nSLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NTASKS=16 "$@"\n',
        "python": f'#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS|$*"\nexit {code}\n',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "8"}
    script = str(DEPLOY / "train.sbatch")
    words = ["/shared/data", "/shared/my train-base", "--steps=3", "--schedule={kind: wsd}"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [bash, script, *words], capture_output=True, text=True, cwd=tmp_path, env={**given, "PATH": path}
    )
    assert done.returncode == code, done.stderr
    where, _, called = done.stdout.strip().partition("|")
    assert where == "9 1 16 node7 23456 8"
    assert (
        called
        == "-m hone train /shared/data --out=/shared/my train-base --device=cuda --steps=3 --schedule={kind: wsd}"
    )
    check_command(["train", "/shared/data", "--out=/shared/my train-base", "--device=cuda", *words[2:]])
    assert (tmp_path / "requeued").exists() == (code == 143)
    text = Path(script).read_text()
    tasks, gpus = (re.search(rf"#SBATCH --{name}=(\d+)", text)[1] for name in ("ntasks-per-node", "gpus-per-node"))
    assert tasks == gpus and "#SBATCH --signal=TERM@" in text and "NCCL_SOCKET_IFNAME" in text


def launcher():
    spec = importlib.util.spec_from_file_location("train_ray", DEPLOY / "train_ray.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ray_launcher_says_what_a_rank_said(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="hone train ended with code 2"):
        launcher().rank({"words": ["no/such/folder", "--out=x"]})
    assert "no/such/folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launcher().main(["--workers=2"])
    assert "give the arguments of hone train after --" in capsys.readouterr().err


def test_the_ray_launcher_gives_every_rank_the_command(monkeypatch):
    pytest.importorskip("ray")
    torch_train = pytest.importorskip("ray.train.torch")
    made = {}

    class Recorded:
        def __init__(self, loop, **given) -> None:
            made.update(given, loop=loop)

        def fit(self) -> None:
            made["fitted"] = True

    monkeypatch.setattr(torch_train, "TorchTrainer", Recorded)
    module = launcher()
    words = ["/shared/data", "--out=/shared/train-base", "--parallelism.data_parallel=zero2"]
    assert module.main(["--workers=16", "--gpus", "--cpus=4", "--", *words]) == 0 and made["fitted"]
    assert made["loop"] is module.rank and made["train_loop_config"] == {"words": [*words, "--device=cuda"]}
    check_command(["train", *made["train_loop_config"]["words"]])
    scale = made["scaling_config"]
    assert (scale.num_workers, scale.use_gpu, scale.resources_per_worker) == (16, True, {"CPU": 4, "GPU": 1})
    assert made["torch_config"].backend == "gloo" and sys.modules.get("hone") is not None
