"""hone train on the workers of a Ray cluster: `python deploy/train_ray.py --workers=32 --gpus -- DATA --out=OUT --field=value ...`.

Ray Train starts the ranks and sets the variables that torchrun would; DATA and OUT lie on a disk that all workers see. A rank that
dies ends all of them, and with --retries they start again, at the newest checkpoint. Needs `pip install "ray[train]"` beside hone.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def rank(config: dict[str, Any]) -> None:
    """One rank: the command `hone train`, in a worker of Ray's."""
    from hone.cli import main

    code = main(["train", *config["words"]])
    if code:
        raise RuntimeError(f"hone train ended with code {code}; its message is in the log of rank 0")


def main(words: list[str]) -> int:
    """Starts the ranks and waits for them; 0 when the model is made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="ranks, on all hosts together")
    parser.add_argument("--gpus", action="store_true", help="give each rank a GPU")
    parser.add_argument("--cpus", type=int, default=1, help="cores of a rank")
    parser.add_argument("--retries", type=int, default=3, help="how often a failed training is started again")
    parser.add_argument(
        "--storage", default=None, help="folder for Ray's own notes of the run; shared, with several hosts"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="after --: the arguments of hone train")
    given = parser.parse_args(words)
    command = given.words[1:] if given.words[:1] == ["--"] else given.words
    if not command:
        parser.error("give the arguments of hone train after --")

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    command += ["--device=cuda"] if given.gpus and not any(one.startswith("--device") for one in command) else []
    resources = {"CPU": given.cpus, **({"GPU": 1} if given.gpus else {})}
    trainer = TorchTrainer(
        rank,
        train_loop_config={"words": command},
        # hone makes a group of its own for GPUs; the ranks meet over gloo.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus, resources_per_worker=resources),
        run_config=RunConfig(storage_path=given.storage, failure_config=FailureConfig(max_failures=given.retries)),
    )
    trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
