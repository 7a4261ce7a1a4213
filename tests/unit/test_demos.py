"""The scripted demonstrator, and its turns as training samples in the ids of a rollout."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from mempo import data, scratch, tags
from mempo.config import Config, Context, Data, Model, Warmstart
from mempo.data.compose import MIX_RELATIONS, Objective
from mempo.data.demos import Dealer, Item, known_answers, next_hop, play
from mempo.data.geo import Entity, Fact, Relation, World, build_world, shuffled
from mempo.data.lessons import Teacher, copy_lesson
from mempo.prompts import PROBE_HEAD, PROBE_TAIL, chat_frame, encode_frame, encode_text

PERFECT = Warmstart(drop_oldest=0, forget=0, wrong_field=0)
WORLD: World = {
    "Norway": Entity("1", "Norway", "Norway", {"capital": "Oslo", "currency": "Krone"}),
    "Lyon": Entity("2", "Lyon", "France", {"country": "France"}),
    "France": Entity("3", "France", "France", {"capital": "Paris", "currency": "Euro"}),
}
OSLO = Objective((Fact("Norway", "capital", "Oslo"),), "first")
EURO = Objective((Fact("Lyon", "country", "France"), Fact("France", "currency", "Euro")), "second")


def texts(rates: Warmstart, *, rule: Context = "memory", seed: int = 0) -> list[str]:
    return [step.text for step in play(WORLD, [OSLO, EURO], rates, Random(seed), rule=rule)]


def test_a_perfect_demonstration() -> None:
    assert texts(PERFECT) == [
        "<think>first capital of Norway</think><search>Norway</search>",
        "<mem>first capital Oslo</mem><think>second country of Lyon</think><search>Lyon</search>",
        "<mem>first capital Oslo; second country France</mem>"
        "<think>second currency of France</think><search>France</search>",
        "<mem>first capital Oslo; second currency Euro</mem><think>answer</think><answer>Oslo; Euro</answer>",
    ]


def test_under_the_full_rule_it_has_no_memory() -> None:
    assert texts(PERFECT, rule="full") == [
        "<think>first capital of Norway</think><search>Norway</search>",
        "<think>first capital Oslo; second country of Lyon</think><search>Lyon</search>",
        "<think>second country France; second currency of France</think><search>France</search>",
        "<think>second currency Euro; answer</think><answer>Oslo; Euro</answer>",
    ]


def test_under_the_think_rule_its_thoughts_are_its_memory() -> None:
    assert texts(PERFECT, rule="think") == [
        "<think>first capital of Norway</think><search>Norway</search>",
        "<think>first capital Oslo; second country of Lyon</think><search>Lyon</search>",
        "<think>first capital Oslo; second country France; second currency of France</think><search>France</search>",
        "<think>first capital Oslo; second currency Euro; answer</think><answer>Oslo; Euro</answer>",
    ]


def test_the_oldest_item_is_dropped_once_and_missed_in_the_answer() -> None:
    rates = Warmstart(drop_oldest=1, forget=0, wrong_field=0)
    answers = {tuple(texts(rates, seed=seed)[2:]) for seed in range(20)}
    assert len(answers) == 2  # in the third turn, or in the fourth
    assert all(last.endswith("<answer>unknown; Euro</answer>") for _, last in answers)


def test_the_rates_are_as_stated() -> None:
    dropped = wrong = 0
    for seed in range(2000):
        dropped += "first" not in texts(Warmstart(drop_oldest=0.3, forget=0, wrong_field=0), seed=seed)[-1]
        wrong += "capital Krone" in texts(Warmstart(drop_oldest=0, forget=0, wrong_field=0.1), seed=seed)[1]
    assert dropped / 2000 == pytest.approx(0.3, abs=0.035)  # 3 standard errors: 3 x sqrt(.3 x .7 / 2000) = .031
    assert wrong / 2000 == pytest.approx(0.1, abs=0.02)


def test_it_acts_on_what_its_memory_says() -> None:
    assert next_hop([OSLO, EURO], []) == (0, 0, "Norway")
    begun = Item(1, "second", 0, False, "country", "France")
    assert next_hop([OSLO, EURO], [begun]) == (1, 1, "France")
    done = Item(1, "second", 1, True, "currency", "Euro")
    assert next_hop([OSLO, EURO], [done]) is None
    assert known_answers([done], 2) == "unknown; Euro"
    assert known_answers([begun], 2) == "unknown; unknown"


@pytest.mark.parametrize(
    ("relations", "patterns"),
    [(MIX_RELATIONS, ["11", "12", "21", "111", "122"]), (frozenset(get_args(Relation)), ["1", "3", "31", "2213"])],
)
def test_dealt_questions_visit_no_entity_twice(relations: frozenset[Relation], patterns: list[str]) -> None:
    random = Random(0)
    dealer = Dealer(shuffled(build_world(Data()), random, lambda name: len(name) < 12), relations, random)
    for pattern in patterns * 20:
        objectives = dealer.objectives(pattern)
        assert "".join(str(len(o.facts)) for o in objectives) == pattern
        names = [name for o in objectives for name in (*(fact.entity for fact in o.facts), o.answer)]
        assert len(set(names)) == len(names)
        assert all(dealer.world[f.entity].facts[f.relation] == f.value for o in objectives for f in o.facts)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    bpe = scratch.train_bpe(data.tokenizer_texts(build_world(Data()), []), Model().vocab_size)
    return scratch.save_tokenizer(bpe, tmp_path_factory.mktemp("tokenizer"), 1024)


def test_lessons_depend_on_the_step_alone(tokenizer: Any) -> None:
    config = Config(warmstart=Warmstart(copy_steps=2))
    world = build_world(config.data)
    teacher = Teacher(tokenizer, world, config)
    straight = [teacher.lessons(step) for step in range(5)]
    assert [Teacher(tokenizer, world, config).lessons(step) for step in (4, 1)] == [straight[4], straight[1]]
    for samples in straight:
        assert len(samples) == 32
        assert sum(sum(sample.loss_mask) * sample.weight for sample in samples) == pytest.approx(1.0)


def test_samples_hold_both_rules_both_probes_and_only_the_models_own_tokens(tokenizer: Any) -> None:
    config = Config(warmstart=Warmstart(copy_steps=0, probe_share=0.3))
    teacher = Teacher(tokenizer, build_world(config.data), config)
    kinds = dict.fromkeys(["memory", "full", "probe of a memory", "probe of the history"], 0)
    for sample in [sample for step in range(12) for sample in teacher.lessons(step)]:
        text = tokenizer.decode(sample.token_ids, skip_special_tokens=False)
        learnt = [t if on else 0 for t, on in zip(sample.token_ids, sample.loss_mask, strict=True)]
        own = tokenizer.decode(learnt, skip_special_tokens=False).replace("<|pad|>", " ")
        assert "<information>" not in own and "What is" not in own and "<|im_" not in own
        if PROBE_HEAD in text:
            body = text.removesuffix(PROBE_TAIL).split(PROBE_HEAD)[0]
            kinds["probe of a memory" if body.endswith("</mem>") else "probe of the history"] += 1
            assert own.strip() == text.split(PROBE_HEAD)[1].removesuffix(PROBE_TAIL)
        else:
            kinds["full" if config.prompt.system_full in text else "memory"] += 1
            assert ("<mem>" in text) != (config.prompt.system_full in text)
    total = sum(kinds.values())
    assert min(kinds.values()) > 10
    probes = (kinds["probe of a memory"] + kinds["probe of the history"]) / total
    assert probes == pytest.approx(0.3 * 0.75, abs=0.08)  # the full rule's quarter of the questions has none


def test_a_turn_is_in_the_ids_of_a_rollout(tokenizer: Any) -> None:
    """The third turn of a demonstration: first prompt, second turn, its observation; nothing of the first turn."""
    config = Config(warmstart=PERFECT)
    teacher = Teacher(tokenizer, WORLD, config)
    steps = play(WORLD, [OSLO, EURO], PERFECT, Random(0), rule="memory")
    turns = teacher.turns("memory", "Which?", WORLD, steps)
    frame = chat_frame(tokenizer, config.prompt.system)
    second = encode_frame(tokenizer, steps[1].text)
    seen = encode_text(tokenizer, "Lyon\nLyon: country France.")
    expected = [*frame.first_prompt(encode_text(tokenizer, "Which?")), *second, *frame.observation(seen, second)]
    assert turns[2].prompt_ids == expected
    start, end = turns[2].mem_span or (0, 0)
    assert tokenizer.decode(turns[2].response_ids[start:end]) == steps[2].segment
    for number, turn in enumerate(turns, start=1):
        parsed = tags.parse_turn(turn.text, number)
        assert parsed.valid and parsed.memory == turn.memory and parsed.argument == turn.argument


def test_a_copy_lesson_asks_for_what_followed() -> None:
    sample = copy_lesson(3072, Random(0))
    pairs = dict(zip(sample.token_ids[0:32:2], sample.token_ids[1:32:2], strict=True))
    asked = [i for i, on in enumerate(sample.loss_mask) if on]
    assert len(asked) == 12
    assert all(pairs[sample.token_ids[i - 1]] == sample.token_ids[i] for i in asked)


def test_data_without_a_policy_of_ones_own_needs_no_copying(tokenizer: Any, tmp_path: Path) -> None:
    config = Config(model=Model(path=str(tmp_path)), warmstart=Warmstart(copy_steps=100))
    samples = Teacher(tokenizer, build_world(config.data), config).lessons(0)
    assert any("<think>" in tokenizer.decode(sample.token_ids) for sample in samples)
