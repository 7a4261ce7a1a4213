"""Two rounds on one GPU with vLLM: does it run, how fast, and does the trainer agree with the sampler?

Without a GPU it says so and ends with exit code 0. `--device cpu` runs the same code in tiny sizes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from mempo.params import load_config

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["loop.num_rounds=2", "loop.dev_every=0", "diagnose.every=0", "data.num_train=256", "data.num_dev=8",
         "data.num_test=8", "tracking.experiment=smoke"]  # fmt: skip
ON_CPU = ["model.hidden_size=64", "model.num_heads=2", "model.num_layers=2", "model.vocab_size=512",
          "data.num_countries=40", "data.num_cities=40", "data.num_train=16", "data.max_name_tokens=8",
          "warmstart.num_steps=4", "warmstart.copy_steps=2", "warmstart.batch_size=4", "rollout.max_turns=2",
          "loop.questions_per_round=2", "loop.group_size=2"]  # fmt: skip
ON_GPU = ["warmstart.num_steps=900", "loop.questions_per_round=32"]
OF_PROFILE = ["warmstart.num_steps=20", "loop.questions_per_round=16"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--engine", choices=["hf", "vllm"], help="default: vllm, on a CPU hf")
    parser.add_argument("--trainer", default="torch", choices=["torch", "deepspeed"])
    parser.add_argument("--profile", help="a folder below params/; without it the demo's policy, with no download")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    root = ROOT / "params" / chosen.profile if chosen.profile else ROOT
    settings = settings_of(chosen)
    try:
        load_config(root / "params.yaml", settings, policy="mempo")
    except ValueError as error:
        raise SystemExit(f"gpu_smoke: {error}") from None
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu_smoke: skipped, torch {torch.__version__} finds no GPU here; --device cpu runs tiny sizes")
        return
    with tempfile.TemporaryDirectory(prefix="mempo-smoke-") as folder:
        os.environ["MEMPO_STATE"] = f"{folder}/state"
        run_and_tell(root, Path(folder) / "workspace", settings)
    if chosen.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{torch.cuda.get_device_name()}: this process held {peak:.1f} GiB at most")


def settings_of(chosen: argparse.Namespace) -> list[str]:
    sizes = ON_CPU if chosen.device == "cpu" else OF_PROFILE if chosen.profile else ON_GPU
    engine = chosen.engine or ("vllm" if chosen.device == "cuda" else "hf")
    runs_on = [f"runtime.{name}={value}" for name, value in
               (("device", chosen.device), ("engine", engine), ("trainer", chosen.trainer))]  # fmt: skip
    return [*SHORT, *sizes, *runs_on, *chosen.settings]


def run_and_tell(root: Path, home: Path, settings: list[str]) -> None:
    """Data, warm start and two rounds below ``home``, then a line a round."""
    from mempo import local

    local.start()
    try:
        import pandas as pd

        from flows.train import train
        from flows.warmstart import begin_workspace
        from mempo.results import rates

        workspace = begin_workspace(root, home, settings)
        train("mempo", settings, str(home))
        rounds = pd.read_parquet(workspace.results("mempo") / "rounds.parquet")
        for index in range(len(rounds)):
            told = [f"{step} {rate:,.0f}" for step, rate in rates(rounds[index : index + 1]).items()]
            print(f"round {index}: tokens a second: {', '.join(told)}")
            gaps = [name for name in rounds if name.startswith("mismatch/")]
            print("  " + ", ".join(f"{name} {rounds[name][index]:.3g}" for name in gaps))
    finally:
        local.stop()


if __name__ == "__main__":  # vLLM's processes import this file
    main()
