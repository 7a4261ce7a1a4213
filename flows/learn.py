"""Does it learn? Several seeds, each from its own warm start, on held-out questions (``mempo learn-check``)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from prefect import flow

from flows.evaluate import evaluate
from flows.train import train
from flows.warmstart import begin_workspace
from mempo import storage
from mempo.overrides import Overrides
from mempo.workspace import Workspace

# The control: nothing written down ever comes back.
NO_MEMORY = "policies.no_memory={rollout: {context: none}, advantage: {mem_weight: 0.0}}"
PUBLISHED = "policies.published={mem_reward: {mask: independent, answer_tokens: last_four}}"
POLICIES = ("mempo", "published", "grpo", "no_memory")


@flow(name="learn", persist_result=False)
def learn(seeds: list[int], overrides: Overrides = None, root: str = ".") -> pd.DataFrame:
    """Warm start, train and evaluate ``POLICIES`` for each seed; a row a seed and policy. Goes on where it stopped."""
    rows = []
    for seed in seeds:
        home = Path(root) / "runs" / "learn" / f"seed_{seed}"
        settings = [NO_MEMORY, PUBLISHED, f"warmstart.seed={seed}", f"loop.seed={seed}", *(overrides or [])]
        workspace = begin_workspace(Path(root), home, settings)
        for name in POLICIES:
            train(name, settings, str(home))
        metrics = evaluate(["warmstart", *POLICIES], settings, str(home))
        for name, figures in metrics.items():
            rows.append({"seed": seed, "policy": name, **figures, **_joint(workspace, name)})
    return pd.DataFrame(rows)


def _joint(workspace: Workspace, name: str) -> dict[str, float]:
    """Sampled EM on questions of two or more objectives, and what always guessing the commonest answers would score."""
    found = pd.read_parquet(workspace.results("evaluation.parquet"))
    joint = found[(found["policy"] == name) & ~found["greedy"] & (found["num_objectives"] >= 2)]
    guesses = storage.read_json(workspace.results("majority.json"))
    counts = joint["num_objectives"].value_counts()
    expected = sum(count * guesses[str(num)] for num, count in counts.items())
    return {"em_joint": float(joint["em"].mean()), "majority_joint": expected / len(joint)}
