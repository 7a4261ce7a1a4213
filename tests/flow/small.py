"""The experiment in small, for tests: a policy of 60,000 parameters that learns the turn format and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PARAMS = """
preset: null
data: {num_countries: 120, num_cities: 200, num_train: 64, num_dev: 4, num_test: 8, max_name_tokens: 3}
model: {vocab_size: 1024, hidden_size: 64, intermediate_size: 64, num_layers: 2, num_heads: 4, window: 1024}
prompt: {}
format: {require_memory: true}
warmstart:
  {num_steps: 400, copy_steps: 1, batch_size: 8, learning_rate: 3e-3, warmup_steps: 20, save_every: 100, num_threads: 1}
search: {}
rollout: {}
scoring: {}
# So small a policy answers nothing right: what it is paid for here is the format, or nothing would be learnt.
reward: {kind: f1, format_credit: 0.5}
mem_reward: {}
advantage: {mem_weight: 1.0}
loss: {}
lora: {}
optim: {learning_rate: 1e-3}
loop: {num_rounds: 6, questions_per_round: 2, group_size: 4, dev_every: 3}
evaluation: {num_questions: 8}
runtime: {num_threads: 1}
tracking: {figure_every: 3}
diagnose: {every: 2}
policies:
  mempo: {}
  grpo: {advantage: {mem_weight: 0.0}}
  full_context: {rollout: {context: full}, format: {require_memory: false}, advantage: {mem_weight: 0.0}}
"""


def environment() -> dict[str, str]:
    """This checkout first on the module path, this interpreter's programs first on the path."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {"PYTHONPATH": str(ROOT), "PATH": scripts}


def mempo(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mempo.cli", *arguments, "--root", str(root)]


def run(command: list[str], cwd: Path | None = None) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
