"""DVC's outputs of an invented run, small and true to their schemas: made of the real records by the real functions."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from mempo import diagnoses, evaluation, rounds, storage
from mempo.config import Config
from mempo.evaluation import EvaluationRow
from mempo.records import Question, Trajectory, TurnScore
from mempo.samples import TurnReward
from tests.unit.builders import probe_score, trajectory, turn, turn_score

START, END = 0.46, {"warmstart": 0.46, "mempo": 0.80, "grpo": 0.78, "full_context": 0.74}
HOSTILE = '</pre><script>alert("x")</script> & <|im_end|>'


def questions(count: int) -> list[Question]:
    golds = [["Lima"], ["Yen"], ["Oslo"]]
    return [
        Question(f"q{i:04d}", f"What is the <b>capital</b> of {i}?", golds[: 1 + i % 3], "test") for i in range(count)
    ]


def rollouts(asked: list[Question], chance: float, randomness: random.Random, group: int = 4) -> list[Trajectory]:
    """Search turns, then an answer turn; right with probability ``chance``; from the second turn on with a memory."""
    found = []
    for question in asked:
        golds = "; ".join(aliases[0] for aliases in question.golden_answers)
        for sample in range(group):
            right = randomness.random() < chance
            searches = [
                turn(40 + 20 * i, 20, (0, 8) if i else None, text=_text(i, "search", "capital of Peru"),
                     observation=f'"Peru"\nPeru: capital Lima. {HOSTILE}')
                for i in range(1 + len(question.golden_answers))
            ]  # fmt: skip
            said = golds if right else HOSTILE
            last = turn(90, 25, (0, 8), text=_text(len(searches), "answer", said), action="answer", observation=None)
            status = "answered" if right or randomness.random() < 0.8 else randomness.choice(["max_turns", "truncated"])
            found.append(
                trajectory(
                    [*searches, last], question.question_id, sample, answer=said, status=status, policy_version=1
                )
            )
    return found


def _text(index: int, tag: str, inside: str) -> str:
    memory = f"<mem>Peru's capital is Lima, fact {index}.</mem>" if index else ""
    return f"{memory}<think>I need to {tag}.</think><{tag}>{inside}</{tag}>"


def rewards(
    trajectories: list[Trajectory], asked: list[Question], randomness: random.Random, *, memory: bool, skill: float
) -> list[TurnReward]:
    """One row a turn; with ``memory``, p_mem and the reward grow with ``skill``, and fall with the turn."""
    golds = {q.question_id: "; ".join(a[0] for a in q.golden_answers) for q in asked}
    rows = []
    for t in trajectories:
        for index, of_turn in enumerate(t.turns, start=1):
            probed = memory and index > 1
            p_full = min(1.0, max(0.0, randomness.gauss(0.92, 0.05))) if probed else None
            p_mem = min(1.0, max(0.0, randomness.gauss(0.35 + 0.5 * skill - 0.06 * index, 0.2))) if probed else None
            reason = None if probed else ("first_turn" if index == 1 else "no_segment") if memory else "not_asked"
            reward = p_mem - p_full if p_mem is not None and p_full is not None else None
            rows.append(
                TurnReward(
                    t.question_id, t.sample_index, index, t.status, of_turn.valid,
                    float(t.answer == golds[t.question_id]), 0.0, reason,
                    p_full, p_mem, 3, randomness.randint(0, 3), 3, reward, 0.1, 8, 60, 20,
                )
            )  # fmt: skip
    return rows


def scores(trajectories: list[Trajectory], table: list[TurnReward]) -> list[TurnScore]:
    """A probe for every row that has a p: the token "Lima", sure on both sides as its row says, in a frame of two."""
    of = {t.key: t for t in trajectories}
    found = []
    for row in table:
        full, mem = ([math.log(max(p, 1e-9))] if p is not None else None for p in (row.p_full, row.p_mem))
        score = turn_score(of[f"{row.question_id}/{row.sample_index}"], row.turn, full, mem)
        if score.probes and full and mem:
            spans = {"text": f"<answer>Lima{HOSTILE}", "gold_spans": [(8, 12)], "token_ids": [1, 2, 3],
                     "starts": [0, 8, 12], "ends": [8, 12, 12 + len(HOSTILE)]}  # fmt: skip
            probe = probe_score([-0.1, *full, -0.1], [-0.1, *mem, -0.1], **spans)
            score = replace(score, probes=[probe])
        found.append(replace(score, reason=row.reason))
    return found


def write_run(root: Path, name: str, num_rounds: int, *, memory: bool) -> None:
    randomness = random.Random(name)
    folder, table, tables = root / "results" / name, [], []
    for index in range(num_rounds):
        skill = index / max(num_rounds - 1, 1)
        asked = questions(8)
        found = rollouts(asked, START + (END.get(name, 0.7) - START) * skill**0.5, randomness)
        of_round = rewards(found, asked, randomness, memory=memory, skill=skill)
        figures = rounds.rollout_figures(found) | rounds.reward_figures(of_round) | _update_figures(skill, randomness)
        figures["em"] = sum(row.score for row in of_round if row.turn == 1) / len(found)
        if (index + 1) % 8 == 0:
            figures |= {
                "dev/em_greedy": 0.7 + 0.2 * skill,
                "dev/f1_greedy": 0.8,
                "time/check_s": 1.5,
                "cpu/check_s": 1.4,
            }
        if index % 8 == 0 and name != "full_context":
            figures |= _control_figures(skill, memory)
        if index:  # the first round was killed and resumed: it has no wall clock
            figures |= {"wall_s": 5.0, "work_s": 4.6}
        table.append({"round": index} | figures)
        tables.append(pd.DataFrame([asdict(row) for row in of_round]).assign(round=index))
        if index in (0, num_rounds - 1):
            storage.write_records(folder / "trajectories" / f"rollouts_{index:04d}.parquet", found)
            storage.write_records(folder / "trajectories" / f"questions_{index:04d}.parquet", asked)
            storage.write_records(folder / "trajectories" / f"scores_{index:04d}.parquet", scores(found, of_round))
    storage.write_json(folder / "config.json", {"config": Config().model_dump(mode="json")})
    made = rounds.RoundRecords(found, rounds.by_question(asked), scores(found, of_round), of_round)
    storage.write_json(folder / "diagnoses.json", diagnoses.summary([made], Config(), {}))
    pd.DataFrame(table).to_parquet(folder / "rounds.parquet")
    pd.concat(tables, ignore_index=True).to_parquet(folder / "rewards.parquet")


def _control_figures(skill: float, memory: bool) -> dict[str, float]:
    worth = {"own": 0.4 + 0.4 * skill, "complete": 0.8, "dropped": 0.3, "empty": 0.1, "other": 0.12, "none": 0.1}
    found: dict[str, float] = {"control/all_full": 0.6, "control/wrong/n": 0, "time/diagnose_s": 2.0}
    for kind, p in worth.items():
        found |= {f"control/{kind}/n": 100, f"control/{kind}/p_mem": p, f"control/{kind}/reward": p - 0.6}
        found |= {f"control/{kind}/all_mem": p, f"control/{kind}/below": 0.9, f"control/gain/{kind}": p - 0.6}
    if memory:
        found |= {"control/gradient/outcome_norm": 0.2, "control/gradient/memory_norm": 0.3}
    return found | ({"control/gradient/cosine": -0.25} if memory else {})


def _update_figures(skill: float, randomness: random.Random) -> dict[str, float]:
    steps = {"rollout": 2.2, "score": 0.6, "advantage": 0.1, "update": 1.7}
    figures = {f"time/{name}_s": seconds * (1 + 0.1 * randomness.random()) for name, seconds in steps.items()}
    figures |= {f"cpu/{name}_s": 0.9 * seconds for name, seconds in steps.items()}
    return figures | {
        "loss": 0.01, "num_tokens": 9000.0, "learning_rate": 1e-4, "approx_kl": 0.004 + 0.002 * randomness.random(),
        "clip_fraction": 0.02 + 0.01 * randomness.random(), "grad_norm": 0.8 - 0.3 * skill + 0.1 * randomness.random(),
        "entropy": 0.3 - 0.15 * skill, "ratio_max": 1.5 + randomness.random(), "probes": 100.0, "mem_weight": 1.0,
    }  # fmt: skip


def evaluation_rows(names: list[str], count: int) -> list[EvaluationRow]:
    found = []
    for name in names:
        randomness = random.Random(name)
        for question in questions(count):
            for greedy in (False, True):
                em = float(
                    randomness.random() < END.get(name, 0.7) + 0.12 * greedy - 0.05 * len(question.golden_answers)
                )
                size = 300 if name == "full_context" else 120
                found.append(
                    EvaluationRow(
                        name, greedy, question.question_id, question.question, question.source,
                        len(question.golden_answers), 0, "Lima",
                        em, em, max(em, 0.3), True, "answered", 4, 4 * size - 100, size, 100.0 * size,
                    )
                )  # fmt: skip
    return found


def write_tree(root: Path, names: tuple[str, ...] = ("mempo", "grpo", "full_context"), num_rounds: int = 24) -> Path:
    """Everything the report reads, under ``root``."""
    for name in names:
        write_run(root, name, num_rounds, memory=name == "mempo")
    rows = evaluation_rows(["warmstart", *names], 300)
    pd.DataFrame([asdict(row) for row in rows]).to_parquet(root / "results" / "evaluation.parquet")
    metrics = {n: evaluation.summary([row for row in rows if row.policy == n]) for n in ("warmstart", *names)}
    storage.write_json(root / "metrics" / "evaluation.json", metrics)
    storage.write_json(root / "results" / "majority.json", MAJORITY)
    return root


MAJORITY = {"1": 0.05, "2": 0.01, "3": 0.002}
