"""The scoring pass: packed trees against one left-padded batch of all contexts, as the published code does it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.rows import Row
from benchmarks.synthetic import demo_policy, trajectories
from benchmarks.timing import side_by_side
from mempo.config import Config
from mempo.cost import product_flops
from mempo.engines import open_engine
from mempo.floor import measure
from mempo.packing import TokenTree
from mempo.probes import full_tree, make_probe, memory_tree, segment_ids
from mempo.runtime import Runtime
from mempo.shapes import shape_of

TURNS = (2, 4, 6, 8, 16)
TARGETS = {6: (5.0, 6.0), 16: (None, 12.0)}  # turns -> times as fast, times fewer tokens
ROWS_AT_ONCE = 32  # of the padded batch: all at once would not fit


def run(folder: Path, full: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    engine = open_engine(demo_policy(folder / "scoring"), Runtime())
    machine = measure(clock=time.process_time)
    for num_turns in TURNS:
        size = (8, 8) if full else (2, 8) if num_turns <= 8 else (1, 4)
        made, questions = trajectories(num_turns, *size, len(engine.tokenizer))
        config = Config()
        trees, contexts = score_trees(engine, made, questions, config), _contexts(engine, made, questions)
        found: dict[str, list[list[float]]] = {}

        def packed(trees=trees, found=found) -> None:
            found["packed"] = engine.logprobs(trees)

        def padded(contexts=contexts, found=found) -> None:
            found["padded"] = _left_padded(engine.model, contexts)

        ours, theirs = side_by_side(packed, padded)
        _agree(found, trees)
        faster, fewer = TARGETS.get(num_turns, (None, None))
        held = sum(len(tree.read()) for tree in trees)
        longest = max(len(ids) for ids, _ in contexts)
        name = f"scoring, {num_turns} turns"
        yield Row(f"{name}, speed", theirs / ours, "higher", f"{ours:.2f} CPU-s against {theirs:.2f} padded", faster)
        tokens = len(contexts) * longest
        yield Row(f"{name}, tokens", tokens / held, "higher", f"{held:,} against {tokens:,} of one padded batch", fewer)
        if num_turns == 6:
            answers = sum(len(tree.targets) for tree in trees)
            floor = product_flops(shape_of(config.model), held, answers) / machine.flop_rate
            told = f"{floor:.2f} s of matrix products at {machine.flop_rate / 1e9:.0f} GFLOP/s, {ours:.2f} measured"
            yield Row("scoring, share of the floor, tiny policy", 100 * floor / ours, "higher", told, unit="%")


def score_trees(engine, made, questions, config: Config) -> list[TokenTree]:
    """What ``scoring.score`` asks for."""
    found = []
    for name, question in questions.items():
        asked = [make_probe(engine.tokenizer, question).asked]
        own = [t for t in made if t.question_id == name]
        pieces = [
            [segment_ids(engine.tokenizer, turn, i + 1)] for t in own for i, turn in enumerate(t.turns) if turn.mem_span
        ]
        found.append(memory_tree(own[0].turns[0].prompt_ids, pieces, asked))
        for trajectory in own:
            indices = [i for i, turn in enumerate(trajectory.turns) if turn.mem_span]
            found.append(full_tree(trajectory.turns, indices, asked, "history"))
    return found


def _contexts(engine, made, questions) -> list[tuple[list[int], int]]:
    """(context and probe, its scored tokens), memories first as in ``score_trees``: question by question."""
    found = []
    for name, question in questions.items():
        probe = make_probe(engine.tokenizer, question)
        own = [t for t in made if t.question_id == name]
        first = own[0].turns[0].prompt_ids
        for t in own:
            for i, turn in enumerate(t.turns):
                if turn.mem_span:
                    found.append((first + segment_ids(engine.tokenizer, turn, i + 1) + probe.token_ids, probe.scored))
        for t in own:
            history = list(first)
            for turn in t.turns:
                if turn.mem_span:
                    found.append((history + probe.token_ids, probe.scored))
                history = history + turn.response_ids + turn.observation_ids
    return found


@torch.no_grad()
def _left_padded(model, contexts: list[tuple[list[int], int]]) -> list[list[float]]:
    """Every context to the longest of all; logits of the answer's rows alone, which is kind to the published way."""
    width = max(len(ids) for ids, _ in contexts)
    values: list[list[float]] = []
    for start in range(0, len(contexts), ROWS_AT_ONCE):
        rows = contexts[start : start + ROWS_AT_ONCE]
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for place, (tokens, _) in enumerate(rows):
            ids[place, width - len(tokens) :] = torch.tensor(tokens)
            mask[place, width - len(tokens) :] = 1
        keep = max(count for _, count in rows) + 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep, use_cache=False
        ).logits
        for place, (tokens, count) in enumerate(rows):
            logprobs = logits[place, -count - 1 : -1].float().log_softmax(-1)
            wanted = torch.tensor(tokens[-count:])
            values.append(logprobs.gather(1, wanted[:, None])[:, 0].tolist())
    return values


def _agree(found: dict[str, list[list[float]]], trees: list[TokenTree]) -> None:
    """Both must be the same numbers, or their times say nothing."""
    ours = [value for values in found["packed"] for value in values]
    theirs = [value for values in found["padded"] for value in values]
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if worst > 1e-4:
        raise AssertionError(f"packed and padded differ by {worst:.2g}")
