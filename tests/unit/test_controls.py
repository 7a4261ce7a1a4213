"""Known good and bad memories: how they are made, that each is scored in its own context, what their figures say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mempo import controls, samples
from mempo.config import Advantage, Config, Diagnose, MemReward, Scoring
from mempo.data import Truth
from mempo.data.demos import Item
from mempo.engines.hf import HFEngine
from mempo.prompts import encode_frame
from mempo.records import Question, Trajectory
from mempo.rounds import RoundRecords
from mempo.runtime import Runtime
from mempo.scoring import score
from mempo.standins import Memory, Standin, known_items, memories, memory_turns, shuffled, spoilt, standins
from tests.unit.builders import question, trajectory, turn, turn_score
from tests.unit.test_scoring import FRANCE, JAPAN, QUESTIONS, THREE_TURNS, alone, make_trajectory

# What the observations "The country of Ulm 1.", "The country of Ulm 2." of the trajectories below show.
FACTS = {
    "france": [
        Truth("france", 0, "first", ["d"], ["Ulm"], ["country"], ["1"]),
        Truth("france", 1, "second", ["d", "e"], ["Ulm", "2"], ["country", "capital"], ["2", "Bern"]),
    ],
    "japan": [Truth("japan", 0, "first", ["d"], ["Ulm"], ["country"], ["3"])],
}


@pytest.fixture(scope="module")
def engine(tiny_policy: Path) -> HFEngine:
    return HFEngine(tiny_policy, Runtime(num_threads=1))


@pytest.fixture(scope="module")
def trajectories(tiny_tokenizer: Any) -> list[Trajectory]:
    france = [make_trajectory(tiny_tokenizer, FRANCE, i, THREE_TURNS) for i in range(2)]
    japan = [*THREE_TURNS[:2], "<mem>Yen Yen is Yen</mem><think>done</think><answer>Yen</answer>"]
    return [*france, make_trajectory(tiny_tokenizer, JAPAN, 0, japan)]


def round_of(engine: HFEngine, trajectories: list[Trajectory], config: Config) -> RoundRecords:
    scores = score(engine, trajectories, QUESTIONS, config)
    _, table = samples.build(trajectories, QUESTIONS, scores, config, round_index=0)
    return RoundRecords(trajectories, QUESTIONS, scores, table)


def made(tokenizer: Any, trajectories: list[Trajectory], index: int, number: int, facts: Any) -> dict[str, Memory]:
    found = memories(tokenizer, memory_turns(trajectories))
    return {s.kind: s.memory for s in standins(tokenizer, trajectories[index], number, found, facts, Random(0))}


def test_a_complete_memory_holds_what_was_seen_before_its_turn(trajectories: list[Trajectory]) -> None:
    texts = [[item.text for item in known_items(trajectories[0], number, FACTS)] for number in (1, 2, 3)]
    assert texts == [[], ["first country 1"], ["first country 1", "second country 2"]]
    (_, later) = known_items(trajectories[0], 3, FACTS)
    assert (later.hop, later.last) == (0, False)  # Bern was never seen
    assert known_items(trajectories[0], 3, {}) == []


def test_every_kind_of_one_turn(tiny_tokenizer: Any, trajectories: list[Trajectory]) -> None:
    found = made(tiny_tokenizer, trajectories, 0, 3, FACTS)
    assert {kind: memory.text for kind, memory in found.items() if kind not in ("dropped", "wrong")} == {
        "own": "Paris; Yen",
        "none": "",
        "other": "Yen Yen is Yen",
        "shuffled": "Yen Paris;",
        "empty": "",
        "complete": "first country 1; second country 2",
    }
    assert found["dropped"].text in ("first country 1", "second country 2")
    assert found["wrong"].text in ("first country 3; second country 2", "first country 1; second country 3")
    assert found["none"].token_ids == []
    for kind in ("own", "empty", "complete", "wrong", "shuffled"):
        assert found[kind].token_ids == encode_frame(tiny_tokenizer, f"<mem>{found[kind].text}</mem>")


def test_another_questions_memory_is_the_nearest_in_length(tiny_tokenizer: Any, trajectories: list[Trajectory]) -> None:
    for index, number in ((0, 2), (0, 3), (2, 2)):
        found = made(tiny_tokenizer, trajectories, index, number, FACTS)
        name = trajectories[index].question_id
        others = [
            len(memory.token_ids)
            for key, memory in memories(tiny_tokenizer, memory_turns(trajectories)).items()
            if key[0] != name
        ]
        own = len(found["own"].token_ids)
        assert abs(len(found["other"].token_ids) - own) == min(abs(length - own) for length in others)


def test_what_cannot_be_made_is_left_out(tiny_tokenizer: Any, trajectories: list[Trajectory]) -> None:
    one = trajectories[:1]
    assert made(tiny_tokenizer, one, 0, 3, {}).keys() == {"own", "none", "shuffled", "empty"}
    # The round's only question knows no second country that is not its own.
    assert "wrong" not in made(tiny_tokenizer, one, 0, 3, FACTS)
    assert "dropped" not in made(tiny_tokenizer, trajectories, 0, 2, FACTS), "a memory of one item would be empty"


def test_hostile_text_makes_no_tag(tiny_tokenizer: Any) -> None:
    items = [Item(0, "first", 0, True, "country", "</mem><answer>Ulm</answer>")]
    found = {"q": [Truth("q", 0, "first", ["d"], ["Ulm"], ["country"], [items[0].value])]}
    first = turn(3, 4, text="x", observation=f"Ulm: {items[0].value} .")
    of = trajectory([first, turn(3, 4, (0, 2), text="<mem>m</mem>")])
    (complete,) = [
        s.memory
        for s in standins(tiny_tokenizer, of, 2, {("q", 0, 2): Memory("m", [1, 2])}, found, Random(0))
        if s.kind == "complete"
    ]
    closing = encode_frame(tiny_tokenizer, "</mem>")
    assert complete.token_ids.count(closing[0]) == 1 and complete.token_ids[-1:] == closing


@given(st.lists(st.sampled_from(["Oslo;", "Bern", "first"]), max_size=5), st.integers())
def test_shuffled_words_are_the_same_words_in_another_order(words: list[str], seed: int) -> None:
    text = " ".join(words)
    found = shuffled(text, Random(seed))
    if len(set(words)) < 2:
        assert found == ""
    else:
        assert found != text and sorted(found.split()) == sorted(words)


def test_spoilt_memories_differ_in_one_item() -> None:
    items = [Item(0, "first", 0, True, "capital", "Oslo"), Item(1, "second", 1, False, "country", "France")]
    for seed in range(8):
        texts = dict(spoilt(items, {"capital": ["Bern"], "country": ["Peru"]}, Random(seed)))
        assert texts["complete"] == "first capital Oslo; second country France"
        assert (texts["dropped"], texts["wrong"]) in (
            ("second country France", "first capital Bern; second country France"),
            ("first capital Oslo", "first capital Oslo; second country Peru"),
        )


@pytest.mark.parametrize("aliases", ["first", "mean"])
def test_every_memory_is_scored_in_its_own_context(
    engine: HFEngine, tiny_tokenizer: Any, trajectories: list[Trajectory], aliases: Any
) -> None:
    config = Config(scoring=Scoring(aliases=aliases))
    records = round_of(engine, trajectories, config)
    figures, rows = controls.measure(engine, records, config, FACTS, round_index=0)
    by_turn = {(s.question_id, s.sample_index, s.turn): s for s in records.scores}
    assert {row.kind for row in rows} == {
        *("own", "complete", "dropped", "wrong", "empty", "other", "shuffled", "none")
    }
    for row in rows:
        of = by_turn[row.key]
        first_prompt = next(t for t in trajectories if t.question_id == row.question_id).turns[0].prompt_ids
        segment = [] if row.kind == "none" else encode_frame(tiny_tokenizer, f"<mem>{row.memory}</mem>")
        values = []
        for probe in of.probes:
            logprobs = alone(engine, [*first_prompt, *segment], probe.token_ids)[-len(probe.starts) :]
            gold = probe.gold_spans[0][0], probe.gold_spans[-1][1]
            kept = [
                p for p, s, e in zip(logprobs, probe.starts, probe.ends, strict=True) if s < gold[1] and e > gold[0]
            ]
            values.append(math.exp(sum(kept) / len(kept)))
        assert row.all_mem == pytest.approx(sum(values) / len(values), rel=1e-3)
        assert row.mem_tokens == len(segment)
    own = {row.key: row for row in rows if row.kind == "own"}
    table = {(row.question_id, row.sample_index, row.turn): row for row in records.table if row.mem_reward is not None}
    assert own.keys() == table.keys()
    for key, row in own.items():
        assert (row.p_mem, row.p_full) == pytest.approx((table[key].p_mem, table[key].p_full), rel=1e-4)
        assert row.reward == pytest.approx(table[key].mem_reward, abs=1e-4)
    assert figures["own/n"] == 6


def test_a_policy_without_memory_reward_is_scored_here(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    plain = Config(advantage=Advantage(mem_weight=0.0))
    records = round_of(engine, trajectories, plain)
    assert not any(score.probes for score in records.scores)
    found = controls.measure(engine, records, plain, FACTS, round_index=0)
    assert found == controls.measure(engine, round_of(engine, trajectories, Config()), Config(), FACTS, round_index=0)


def test_turns_are_drawn_by_round_and_seed_alone(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    turns = memory_turns(trajectories)
    config = Config(diagnose=Diagnose(num_turns=2))
    drawn = [controls.chosen_turns(turns, config, index) for index in range(20)]
    assert all(len(keys) == 2 and [key for key in turns if key in keys] == keys for keys in drawn)
    assert drawn == [controls.chosen_turns(turns, config, index) for index in range(20)]
    assert {key for keys in drawn for key in keys} == set(turns)
    assert controls.chosen_turns(turns, Config(), 0) == list(turns)
    records = round_of(engine, trajectories, config)
    _, rows = controls.measure(engine, records, config, FACTS, round_index=3)
    assert list(dict.fromkeys(row.key for row in rows)) == drawn[3]


def test_what_leaves_no_room_in_the_window_is_left_out(engine: HFEngine, trajectories: list[Trajectory]) -> None:
    config = Config()
    scores = {(s.question_id, s.sample_index, s.turn): s for s in score(engine, trajectories, QUESTIONS, config)}
    first_prompt = trajectories[0].turns[0].prompt_ids
    asked = len(scores["france", 0, 2].probes[0].token_ids)
    room = engine.window - len(first_prompt) - asked
    both = [Standin(("france", 0, 2), "own", Memory("m", [5] * length)) for length in (room, room + 1)]
    assert len(controls.scored(engine, both, scores, {"france": first_prompt}, config)) == 1


HALF, FIFTH = math.log(0.5), math.log(0.2)


def hand_made(kind: Any, mem: list[float], sample: int = 0) -> Any:
    """A stand-in for turn 2 with these log-probs of its two answer tokens; after everything each has p = 0.5."""
    of = trajectory([turn(3, 4), turn(3, 4, (0, 2))], sample=sample)
    return Standin(("q", sample, 2), kind, Memory(kind, [1, 2, 3])), turn_score(of, 2, [HALF, HALF], mem)


def test_figures_worked_by_hand() -> None:
    pairs = [
        hand_made("complete", [math.log(0.9)] * 2),
        hand_made("empty", [math.log(0.1)] * 2),
        hand_made("own", [math.log(0.8), FIFTH]),  # geometric mean sqrt(0.8 * 0.2) = 0.4; above 0.5: 0.8 alone
        hand_made("own", [math.log(0.9)] * 2, sample=1),  # a turn without a complete memory beside it
    ]
    config = Config(mem_reward=MemReward(mask="independent", threshold=0.5))
    rows = controls.rows_of(pairs, [score for _, score in pairs], config)
    # Nothing clears the threshold after everything (0.5 is not above it): p_full is 1, and so is the empty memory's.
    assert [row.p_full for row in rows] == [1.0] * 4
    assert [row.p_mem for row in rows] == pytest.approx([0.9, 1.0, 0.8, 0.9])
    assert [row.reward for row in rows] == pytest.approx([-0.1, 0.0, -0.2, -0.1])
    assert [row.all_mem for row in rows] == pytest.approx([0.9, 0.1, 0.4, 0.9])
    found = controls.figures(rows)
    assert found["empty/below"] == 0.0  # the empty memory is paid more than the complete one
    assert found["own/below"] == 1.0  # of the one turn that has a complete memory
    assert found["own/reward"] == pytest.approx(-0.15)
    assert found["own/all_mem"] == pytest.approx(0.65)
    assert found["gain/own"] == pytest.approx(0.15)
    assert found["all_full"] == pytest.approx(0.5)
    assert found["dropped/n"] == 0
    assert found["gain/complete"] == pytest.approx(0.4)
    assert not {"gain/other", "gain/empty", "dropped/p_mem", "complete/below"} & found.keys()

    unfiltered = controls.rows_of(pairs, [], Config(mem_reward=MemReward(mask="none", kind="log_ratio")))
    assert [row.reward for row in unfiltered] == pytest.approx(
        [math.log(p / 0.5) for p in (0.9, 0.1, 0.4, 0.9)], abs=1e-6
    )
    assert controls.figures(unfiltered)["empty/below"] == 1.0


def test_a_quantile_is_that_of_the_round() -> None:
    pairs = [hand_made("own", [math.log(0.8), FIFTH])]
    others = [hand_made("own", [math.log(0.9)] * 2)[1]] * 3
    config = Config(mem_reward=MemReward(mask="independent", quantile=0.5))
    # Of 0.5 x 6 and 0.9 x 6 the median is 0.7: of this memory 0.8 is kept, of everything nothing.
    (row,) = controls.rows_of(pairs, others, config)
    assert (row.p_mem, row.p_full) == (pytest.approx(0.8), 1.0)


def test_no_memory_at_all_is_not_infinitely_compressed() -> None:
    of, score_ = hand_made("none", [HALF, HALF])
    config = Config(mem_reward=MemReward(mask="none", kind="compression", return_horizon=2))
    (row,) = controls.rows_of([(of, replace(score_, mem_tokens=0))], [score_], config)
    assert row.reward == pytest.approx(30.0)  # (0.5 / 0.5) / (1 of 30 tokens)


def test_signals_are_two_halves_of_the_advantage_on_memory_tokens() -> None:
    of = [
        trajectory([turn(2, 3), turn(2, 4, (0, 2))], sample=0, answer="Paris"),
        trajectory([turn(2, 3), turn(2, 4, (1, 3))], sample=1, answer="Ulm"),
    ]
    scores = [
        score for t in of for score in (turn_score(t, 1), turn_score(t, 2, [HALF], [HALF if t.sample_index else FIFTH]))
    ]
    config = Config(mem_reward=MemReward(mask="none"), advantage=Advantage(mem_weight=0.5))
    built, _ = samples.build(of, {"q": question()}, scores, config, round_index=0)
    outcome, memory = controls.signals(built, of, config, 0)
    assert [s.key for s in outcome] == [s.key for s in memory] == ["q/0/2", "q/1/2"]
    assert [s.loss_mask for s in outcome] == [s.loss_mask for s in memory] == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    whole = [sample for sample in built if sample.key in ("q/0/2", "q/1/2")]
    for one, two, both in zip(outcome, memory, whole, strict=True):
        assert one.outcome_advantage == both.outcome_advantage != 0 and not any(one.memory_advantages)
        assert two.outcome_advantage == 0 and two.memory_advantages == both.memory_advantages
        assert one.weight == two.weight == both.weight
    # mem_weight 0.5 of the advantages -+ 1 / sqrt(2) of the pool of two
    assert memory[0].memory_advantages[2] == pytest.approx(-0.5 / math.sqrt(2), abs=1e-4)
    nothing = [replace(sample, weight=0.0) for sample in built]
    assert controls.signals(nothing, of, config, 0) == ([], [])


def test_a_round_without_memories_has_counts_alone(engine: HFEngine) -> None:
    asked = Question("q", "What is the capital of France?", [["Paris"]])
    records = RoundRecords([], {"q": asked}, [], [])
    figures, rows = controls.measure(engine, records, Config(), FACTS, round_index=0)
    assert rows == [] and set(figures.values()) == {0.0}
