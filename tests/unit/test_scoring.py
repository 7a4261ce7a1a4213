"""The scoring pass against its definition: each context written out alone, one plain forward pass each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import normalizers

from mempo import mem_reward, probes, prompts, rounds, tags
from mempo.config import Advantage, Config, LossConfig, Rollout, Scoring
from mempo.engines.hf import HFEngine
from mempo.packing import TokenTree
from mempo.records import ProbeScore, Question, Trajectory, Turn, TurnScore
from mempo.runtime import Runtime
from mempo.scoring import score
from mempo.storage import write_json
from mempo.turns import read_turn
from tests import tiny
from tests.tiny import make_policy, make_tokenizer

RUNTIME = Runtime(num_threads=1)
FRANCE = Question("france", "What is the capital of France?", [["Paris", "paris"], ["Yen"]])
JAPAN = Question("japan", "What is the currency of Japan?", [["Yen"]])
QUESTIONS = {question.question_id: question for question in (FRANCE, JAPAN)}
THREE_TURNS = [
    "<think>search</think><search>capital</search>",
    "<mem>the capital of France is Paris</mem><think>next</think><search>currency</search>",
    "<mem>Paris; Yen</mem><think>done</think><answer>Paris; Yen</answer>",
]
NO_MEMORY = [
    THREE_TURNS[0],
    "<think>x</think><search>capital of Ulm</search>",
    "<mem></mem><think>y</think><answer>9</answer>",
]


def make_turn(tokenizer: Any, prompt_ids: list[int], text: str, observation: str | None, number: int) -> Turn:
    ids = prompts.encode_frame(tokenizer, text)
    assert tags.token_offsets(tokenizer, ids)[0] == text
    frame = prompts.chat_frame(tokenizer, "You are a helpful assistant.")
    after = frame.observation(prompts.encode_text(tokenizer, observation), ids) if observation is not None else []
    logprobs = [-0.5 - i / 8 for i in range(len(ids))]
    turn = read_turn(tokenizer, prompt_ids, ids, number, sampling_logprobs=logprobs)
    return replace(turn, observation=observation, observation_ids=after)


def make_trajectory(tokenizer: Any, question: Question, index: int, texts: Sequence[str]) -> Trajectory:
    """Turns under the rule ``memory``; every turn but the last one has an observation."""
    frame = prompts.chat_frame(tokenizer, "You are a helpful assistant.")
    first = frame.first_prompt(prompts.encode_text(tokenizer, question.question))
    turns: list[Turn] = []
    for number, text in enumerate(texts, start=1):
        observation = f"The country of Ulm {number}." if number < len(texts) else None
        turns.append(make_turn(tokenizer, prompts.context("memory", first, turns), text, observation, number))
    return Trajectory(question.question_id, index, 0, turns, "Paris", "answered")


@pytest.fixture(scope="module")
def engine(tiny_policy: Path) -> HFEngine:
    return HFEngine(tiny_policy, RUNTIME)


@pytest.fixture(scope="module")
def trajectories(tiny_tokenizer: Any) -> list[Trajectory]:
    made = [make_trajectory(tiny_tokenizer, FRANCE, i, THREE_TURNS) for i in range(2)]
    made.append(make_trajectory(tiny_tokenizer, FRANCE, 2, NO_MEMORY))
    return [*made, make_trajectory(tiny_tokenizer, JAPAN, 0, [*THREE_TURNS[:2], *THREE_TURNS[1:]])]


def config(**sections: Any) -> Config:
    return Config(**sections)


@torch.no_grad()
def alone(engine: HFEngine, context: list[int], continuation: list[int], temperature: float = 1.0) -> list[float]:
    """log p(continuation | context), in one plain forward pass of the whole sequence."""
    ids = torch.tensor([context + continuation])
    logprobs = (engine.model(ids).logits[0].double() / temperature).log_softmax(-1)
    return [float(logprobs[len(context) - 1 + i, token]) for i, token in enumerate(continuation)]


def after(engine: HFEngine, context: list[int], probe: ProbeScore) -> list[float]:
    """The whole probe after ``context``; of its log-probs the last, which are scored."""
    return alone(engine, context, probe.token_ids)[-len(probe.starts) :]


def contexts(trajectory: Trajectory, number: int) -> tuple[list[int], list[int]]:
    """The full context of turn ``number`` and the memory context, where tags are tokens of their own."""
    first = trajectory.turns[0].prompt_ids
    full = list(first)
    for turn in trajectory.turns[: number - 1]:
        full += turn.response_ids + turn.observation_ids
    turn = trajectory.turns[number - 1]
    start, end = turn.mem_span or (0, 0)
    return full, first + turn.response_ids[start:end]


def by_key(scores: Sequence[TurnScore]) -> dict[tuple[str, int, int], TurnScore]:
    return {(s.question_id, s.sample_index, s.turn): s for s in scores}


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_probes_equal_each_context_written_out_alone(
    engine: HFEngine, trajectories: list[Trajectory], mode: Any
) -> None:
    options = config(scoring=Scoring(mode=mode))
    scores = score(engine, trajectories, QUESTIONS, options)
    assert [(s.question_id, s.sample_index, s.turn) for s in scores] == [
        (t.question_id, t.sample_index, number) for t in trajectories for number in range(1, len(t.turns) + 1)
    ]
    found = by_key(scores)
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns, start=1):
            one = found[trajectory.question_id, trajectory.sample_index, number]
            if number == 1 or turn.mem_span is None:
                assert one.reason == ("first_turn" if number == 1 else "no_segment")
                assert one.probes == []
                continue
            full, memory = contexts(trajectory, number)
            assert one.reason is None and one.policy_version == 0 and one.scorer == "actor@0"
            assert one.probes[0].full_logprobs == pytest.approx(after(engine, full, one.probes[0]), abs=1e-4)
            assert one.probes[0].mem_logprobs == pytest.approx(after(engine, memory, one.probes[0]), abs=1e-4)
            assert one.context_tokens == len(full)
            assert one.mem_tokens == len(memory) - len(trajectory.turns[0].prompt_ids)


def test_full_context_ends_with_the_assistant_header_and_holds_no_own_output(
    engine: HFEngine, trajectories: list[Trajectory]
) -> None:
    full, _ = contexts(trajectories[0], 3)
    text = engine.tokenizer.decode(full)
    assert text.endswith("<|im_start|>assistant\n") and "Paris; Yen" not in text
    # Another last turn changes what its memory says, and not a single bit of what the history says.
    other = make_trajectory(
        engine.tokenizer, FRANCE, 0, [*THREE_TURNS[:2], "<mem>unknown</mem><think>y</think><answer>z</answer>"]
    )
    ours, theirs = (by_key(score(engine, [t], QUESTIONS, config()))["france", 0, 3] for t in (trajectories[0], other))
    assert ours.probes[0].full_logprobs == theirs.probes[0].full_logprobs
    assert ours.probes[0].mem_logprobs != theirs.probes[0].mem_logprobs


def test_baseline_seen_stands_after_the_prompt_of_the_turn(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    history = by_key(score(engine, trajectories, QUESTIONS, config()))
    for mode in ("packed", "padded"):
        seen = by_key(score(engine, trajectories, QUESTIONS, config(scoring=Scoring(baseline="seen", mode=mode))))
        for trajectory in trajectories:
            for number, turn in enumerate(trajectory.turns, start=1):
                one = seen[trajectory.question_id, trajectory.sample_index, number]
                if one.reason is None:
                    expected = after(engine, turn.prompt_ids, one.probes[0])
                    assert one.probes[0].full_logprobs == pytest.approx(expected, abs=1e-4)
                    assert one.context_tokens == len(turn.prompt_ids)
        # In turn 2 both contexts are the same; in turn 3 the rule has dropped turn 1.
        second, third = ("france", 0, 2), ("france", 0, 3)
        assert seen[second].probes[0].full_logprobs == pytest.approx(history[second].probes[0].full_logprobs, abs=1e-4)
        assert seen[third].probes[0].full_logprobs != pytest.approx(history[third].probes[0].full_logprobs, abs=1e-2)


def test_results_do_not_depend_on_what_is_scored_together(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    together = score(engine, trajectories, QUESTIONS, config())
    for shards in ([[t] for t in trajectories], [trajectories[::-1]], [trajectories[::2], trajectories[1::2]]):
        apart = by_key([one for shard in shards for one in score(engine, shard, QUESTIONS, config())])
        for one in together:
            other = apart[one.question_id, one.sample_index, one.turn]
            for ours, theirs in zip(one.probes, other.probes, strict=True):
                assert theirs.full_logprobs == pytest.approx(ours.full_logprobs, abs=1e-5)
                assert theirs.mem_logprobs == pytest.approx(ours.mem_logprobs, abs=1e-5)


def test_a_tree_a_trajectory_and_a_tree_of_memories_a_question(
    engine: HFEngine, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[TokenTree]] = []
    run = engine.logprobs

    def recorded(trees: Sequence[TokenTree], **options: Any) -> list[list[float]]:
        passes.append(list(trees))
        return run(trees, **options)

    monkeypatch.setattr(engine, "logprobs", recorded)
    score(engine, trajectories, QUESTIONS, config())
    full, memory = passes
    assert (len(full), len(memory)) == (4, 2)
    firsts = {tuple(t.turns[0].prompt_ids) for t in trajectories}
    for tree in memory:
        # all branches hang on the end of one first prompt
        roots = {parent for i, parent in enumerate(tree.parents) if parent != i - 1}
        assert {tuple(tree.token_ids[: root + 1]) for root in roots} <= firsts and len(roots) <= 1


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_look_ahead_reads_the_memory_and_the_observations_that_follow(
    engine: HFEngine, trajectories: list[Trajectory], mode: Any
) -> None:
    trajectory = trajectories[3]  # four turns: the second sees two more observations, the last none
    options = config(scoring=Scoring(mode=mode, lookahead=2))
    scores = score(engine, trajectories, QUESTIONS, options)
    found = by_key(scores)
    for number, ahead in ((2, 2), (3, 1), (4, 0)):
        (probe,) = found["japan", 0, number].probes
        _, memory = contexts(trajectory, number)
        assert len(probe.ahead_logprobs) == ahead
        assert probe.mem_logprobs == pytest.approx(after(engine, memory, probe), abs=1e-4)
        for turn, logprobs in zip(trajectory.turns[number - 1 :], probe.ahead_logprobs, strict=False):
            memory = memory + turn.observation_ids
            assert logprobs == pytest.approx(after(engine, memory, probe), abs=1e-4)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_every_wording_of_the_answer_is_scored_once(
    engine: HFEngine, trajectories: list[Trajectory], mode: Any
) -> None:
    # Alias i of each objective, its last where it has fewer: Paris; Yen, then paris; Yen. A third one would be equal.
    golds = [["Paris", "paris", "paris"], ["Yen"]]
    asked = {"france": replace(FRANCE, golden_answers=golds), "japan": JAPAN}
    options = config(scoring=Scoring(mode=mode, aliases="best", lookahead=1))
    found = by_key(score(engine, trajectories, asked, options))
    probes_of = found["france", 0, 2].probes
    assert ["Paris; Yen" in probes_of[0].text, "paris; Yen" in probes_of[1].text] == [True, True] and len(
        probes_of
    ) == 2
    full, memory = contexts(trajectories[0], 2)
    for probe in probes_of:
        assert probe.full_logprobs == pytest.approx(after(engine, full, probe), abs=1e-4)
        assert probe.mem_logprobs == pytest.approx(after(engine, memory, probe), abs=1e-4)
        seen = memory + trajectories[0].turns[1].observation_ids
        assert probe.ahead_logprobs[0] == pytest.approx(after(engine, seen, probe), abs=1e-4)
    assert len(found["japan", 0, 2].probes) == 1
    assert len(by_key(score(engine, trajectories, asked, config()))["france", 0, 2].probes) == 1


def test_p_full_of_a_frozen_reference_and_its_drift(
    engine: HFEngine, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    reference = HFEngine(make_policy(tmp_path / "frozen", engine.tokenizer, seed=1), RUNTIME)
    options = config(scoring=Scoring(full_scorer="reference"))
    with pytest.raises(ValueError, match="need the reference policy"):
        score(engine, trajectories, QUESTIONS, options)
    scores = score(engine, trajectories, QUESTIONS, options, reference=reference)
    one = by_key(scores)["france", 0, 3]
    full, memory = contexts(trajectories[0], 3)
    (probe,) = one.probes
    assert one.scorer == "reference" and not any(one.ref_logprobs)  # no KL term, no reference on the response
    assert probe.full_logprobs == pytest.approx(after(reference, full, probe), abs=1e-4)
    assert probe.actor_logprobs == pytest.approx(after(engine, full, probe), abs=1e-4)
    assert probe.mem_logprobs == pytest.approx(after(engine, memory, probe), abs=1e-4)
    # Of every first wording: the mean over the tokens of "Paris; Yen" or "Yen", the reference's minus the actor's.
    gaps = []
    for p in (s.probes[0] for s in scores if s.probes):
        gold = range(p.text.index("<answer>\n") + len("<answer>\n"), p.text.index("\n</answer>"))
        answer = [i for i, (a, b) in enumerate(zip(p.starts, p.ends, strict=True)) if set(range(a, b)) & set(gold)]
        gaps.append(sum(p.full_logprobs[i] - p.actor_logprobs[i] for i in answer) / len(answer))
    assert rounds.score_figures(scores)["p_full/drift"] == pytest.approx(sum(gaps) / len(gaps))
    with_actor = score(engine, trajectories, QUESTIONS, config())
    assert "p_full/drift" not in rounds.score_figures(with_actor)


def test_a_context_past_the_window_gives_no_signal(
    engine: HFEngine, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    trajectory = trajectories[0]
    probe = probes.make_probe(engine.tokenizer, FRANCE)
    need = len(contexts(trajectory, 3)[0]) + len(probe.token_ids)
    for window, expected in ((need, None), (need - 1, "overflow")):
        small = HFEngine(make_policy(tmp_path / str(window), engine.tokenizer, window=window), RUNTIME)
        scores = score(small, [trajectory], QUESTIONS, config())
        assert [s.reason for s in scores] == ["first_turn", None, expected]
        assert [len(p.full_logprobs) for p in scores[2].probes] == ([] if expected else [probe.scored])


def test_without_a_memory_reward_no_probe_is_asked(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    scores = score(engine, trajectories[1:3], QUESTIONS, config(advantage=Advantage(mem_weight=0)))
    assert [s.reason for s in scores] == [
        "first_turn",
        "not_asked",
        "not_asked",
        "first_turn",
        "no_segment",
        "not_asked",
    ]
    assert all(s.old_logprobs for s in scores)


def test_other_policy_versions_stop_the_run(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    stale = replace(trajectories[1], policy_version=3)
    with pytest.raises(ValueError, match=r"stale: trajectory france/1 .* policy version 3, the engine runs version 0"):
        score(engine, [trajectories[0], stale], QUESTIONS, config())


def test_old_and_reference_logprobs(engine: HFEngine, trajectories: list[Trajectory], tmp_path: Path) -> None:
    some = trajectories[:1]
    turns = some[0].turns
    given = score(engine, some, QUESTIONS, config())
    assert [s.old_logprobs for s in given] == [t.sampling_logprobs for t in turns]
    assert [s.ref_logprobs for s in given] == [[0.0] * len(t.response_ids) for t in turns]
    frozen = make_policy(tmp_path / "frozen", engine.tokenizer, seed=1)
    write_json(frozen / "trainer.json", {"policy_version": 99})  # a reference may be of any version
    reference = HFEngine(frozen, RUNTIME)
    options = config(loss=LossConfig(old_logprobs="recomputed", kl_coef=0.1), rollout=Rollout(temperature=0.6))
    for turn, one in zip(turns, score(engine, some, QUESTIONS, options, reference=reference), strict=True):
        assert one.old_logprobs == pytest.approx(alone(engine, turn.prompt_ids, turn.response_ids, 0.6), abs=1e-4)
        assert one.ref_logprobs == pytest.approx(alone(reference, turn.prompt_ids, turn.response_ids, 0.6), abs=1e-4)
        assert one.old_logprobs != pytest.approx(alone(engine, turn.prompt_ids, turn.response_ids), abs=1e-2)


def test_scores_end_where_the_turns_end(engine: HFEngine) -> None:
    assert score(engine, [], QUESTIONS, config()) == []
    empty = Trajectory("japan", 0, 0, [], None, "context_overflow")
    assert score(engine, [empty], QUESTIONS, config()) == []


GOLDS = [
    ["Paris"],
    ["Paris", "Yen"],
    ["乌尔姆。", "里德学院"],
    ["Apple Inc."],
    ["10%"],
    ["C++ "],
    ["<|im_end|>"],
    ["</answer>"],
]


@pytest.mark.parametrize("golds", GOLDS)
def test_the_probe_is_the_text_and_its_offsets_find_the_gold(tiny_tokenizer: Any, golds: list[str]) -> None:
    probe = probes.make_probe(tiny_tokenizer, Question("q", "?", [[gold] for gold in golds]))
    gold = mem_reward.gold_text([[g] for g in golds])
    thought = "\n<think>\nI have sufficient information to provide the final answers.\n</think>"
    assert probe.text == f"{thought}\n<answer>\n{gold}\n</answer>"
    assert tiny_tokenizer.decode(probe.token_ids) == probe.text
    assert [probe.text[start:end] for start, end in probe.gold_spans] == golds
    assert len(probe.offsets) == len(probe.token_ids) and probe.offsets[-1][1] == len(probe.text)
    assert probe.core_tokens == len(prompts.encode_text(tiny_tokenizer, gold))
    # What is scored begins where the first rule begins, and ends with the probe.
    starts, ends = zip(*probe.offsets, strict=True)
    rules = [
        mem_reward.answer_mask(starts, ends, probe.gold_spans),
        mem_reward.last_four_mask(len(starts), probe.core_tokens),
    ]
    frame = len(starts) - probe.scored
    assert not any(any(rule[:frame]) for rule in rules) and any(rule[frame] for rule in rules)
    # Gold text makes no special token: the frame holds <think>, </think>, <answer>, </answer> once each.
    specials = [token for token in probe.token_ids if token in tiny_tokenizer.get_added_vocab().values()]
    assert tiny_tokenizer.convert_ids_to_tokens(specials) == ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer in which tags are text, and tag edges merge with their neighbours, as in real vocabularies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "TEXT", (*tiny.TEXT, "</mem><think> </mem>\n <answer> .</mem> " * 40))
        tokenizer = make_tokenizer(600, tags=False)
    pieces = tokenizer.tokenize("x.</mem><think>")
    assert "><" in pieces and ".</" in pieces, pieces
    return tokenizer


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("<mem>Ulm.</mem><think>a</think><search>b</search>", [">"]),
        ("><mem>Ulm</mem><think>", ["<", ">"]),
        ("<mem>Ulm</mem> <think>a</think>", []),
        ("<mem></mem><think>", [">"]),
    ],
)
def test_an_overhanging_edge_token_gives_way_to_its_inside(merging: Any, text: str, replaced: list[str]) -> None:
    turn = make_turn(merging, [1], text, None, 2)
    found = probes.segment_ids(merging, turn, 2)
    inside = text[text.index("<mem>") : text.index("</mem>") + len("</mem>")]
    assert merging.decode(found) == inside
    start, end = turn.mem_span or (0, 0)
    own = turn.response_ids[start:end]
    changed = [merging.decode([new]) for new, old in zip(found, own, strict=True) if new != old]
    assert changed == replaced


words = st.lists(st.sampled_from(["Ulm", ".", " ", "\n", "。", "é", "<", ">", "北京", "</", "🙂"]), max_size=6).map(
    "".join
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words, words, words)
def test_any_segment_decodes_to_its_own_characters(merging: Any, before: str, inside: str, after: str) -> None:
    text = f"{before}<mem>{inside}</mem>{after}<think>"
    turn = make_turn(merging, [1], text, None, 2)
    chars = tags.parse_turn(text, 2).memory_chars
    if chars is not None:
        assert merging.decode(probes.segment_ids(merging, turn, 2)) == text[chars[0] : chars[1]]


def test_a_probe_the_tokenizer_does_not_carry_through_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="question 'q': the tokenizer turns"):
        probes.make_probe(tokenizer, Question("q", "?", [["Paris"]]))
