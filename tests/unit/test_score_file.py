"""Anyone's trajectories get the pipeline's own numbers, in whichever form they come."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from mempo import prompts, samples, score_file as scorer
from mempo.config import Config
from mempo.engines import open_engine
from mempo.params import ConfigError, load_config
from mempo.runtime import Runtime
from mempo.score_file import ScoredTurn, score_file
from mempo.scoring import score
from mempo.transcript_tokens import encode_response
from tests.tiny import make_policy, make_tokenizer
from tests.unit.transcript_rows import QUESTION, SAID, rollouts, rows_of, written

ANY_OPTIONS = ["scoring.lookahead=1", "scoring.aliases=best", "mem_reward.mask=shared", "mem_reward.empty=zero"]


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer(tags=request.param == "tags are tokens")
    return make_policy(tmp_path_factory.mktemp("scored") / "policy", tokenizer, window=1024)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("form", ["turns", "messages", "ids", "marks"])
@pytest.mark.parametrize("settings", [[], ANY_OPTIONS])
def test_every_form_gets_the_pipelines_own_numbers(
    policy: Path, tmp_path: Path, form: str, name: str, settings: list[str]
) -> None:
    engine = open_engine(policy, Runtime())
    trajectories = rollouts(engine.tokenizer)
    config = load_config(None, settings)
    scores = score(engine, trajectories, {"ulm": QUESTION}, config)
    _, expected = samples.build(trajectories, {"ulm": QUESTION}, scores, config, round_index=0)
    rows = score_file(written(tmp_path / name, rows_of(trajectories, form)), policy, config)
    assert [(row.id, row.sample_index, row.turn, row.reason) for row in rows] == [
        ("ulm", 0, 1, "first_turn"),
        ("ulm", 0, 2, None),
        ("ulm", 0, 3, None),
        ("ulm", 1, 1, "first_turn"),
        ("ulm", 1, 2, None),
    ]
    for row, reward, one in zip(rows, expected, scores, strict=True):
        for field in ("p_full", "p_mem", "mem_reward", "mem_advantage"):
            assert getattr(row, field) == pytest.approx(getattr(reward, field), abs=1e-5)
        for field in ("kept_full", "kept_mem", "answer_tokens", "mem_tokens", "context_tokens"):
            assert getattr(row, field) == getattr(reward, field)
        assert row.full_logprobs == pytest.approx(one.probes[0].full_logprobs if one.probes else [], abs=1e-5)
        assert row.mem_logprobs == pytest.approx(one.probes[0].mem_logprobs if one.probes else [], abs=1e-5)


def test_a_row_explains_its_own_numbers(tiny_policy: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", rows_of(rollouts(make_tokenizer()), "turns"))
    rows = score_file(path, tiny_policy, load_config(None, ["mem_reward.mask=none"]))
    scored = [row for row in rows if row.reason is None]
    assert len(scored) == 3
    for row in scored:
        golds = [text for text, on in zip(row.tokens, row.answer_mask, strict=True) if on]
        assert "".join(golds) == "Berlin; Yen" and row.answer_tokens == len(golds) == row.kept_mem
        for p, mask, logprobs in (
            (row.p_full, row.full_mask, row.full_logprobs),
            (row.p_mem, row.mem_mask, row.mem_logprobs),
        ):
            kept = [logprob for logprob, on in zip(logprobs, mask, strict=True) if on]
            assert p == pytest.approx(math.exp(sum(kept) / len(kept)))
        assert row.mem_reward == pytest.approx((row.p_mem or 0) - (row.p_full or 0))
    # One question: the advantages of its three memories have mean 0 and unbiased variance 1.
    assert sum(row.mem_advantage for row in scored) == pytest.approx(0)
    assert sum(row.mem_advantage**2 for row in scored) / 2 == pytest.approx(1, rel=1e-2)


def test_marks_are_taken_where_they_are_not_the_texts(tiny_policy: Path, tmp_path: Path) -> None:
    rows = rows_of(rollouts(make_tokenizer()), "marks")
    marks = rows[0]["turns"][1]["marks"]
    marks[:] = [0, 1, 0, 2, *[0] * (len(marks) - 4)]
    rows[1]["turns"][1]["marks"] = [0] * len(rows[1]["turns"][1]["marks"])
    found = score_file(written(tmp_path / "a.jsonl", rows), tiny_policy, Config())
    assert [(row.mem_tokens, row.reason) for row in found[1::3]] == [(3, None), (0, "no_segment")]


def test_contexts_past_the_window_are_counted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    policy = make_policy(tmp_path / "policy", tokenizer, window=256)
    rows = rows_of(rollouts(tokenizer), "turns")
    rows[0]["turns"][0]["observation"] = "word " * 5000
    found = score_file(written(tmp_path / "a.jsonl", rows), policy, Config())
    assert [row.reason for row in found] == ["first_turn", "overflow", "overflow", "first_turn", None]
    assert "2 overflow" in shown(found)


def shown(rows: list[ScoredTurn], width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(scorer.table(rows))
    return out.getvalue()


def test_the_table_fits_a_terminal_and_obeys_no_text(tiny_policy: Path, tmp_path: Path) -> None:
    rows = rows_of(rollouts(make_tokenizer()), "turns")
    for row in rows:
        row["id"] = "[red]\x1b[2J" + "long" * 20
    text = shown(score_file(written(tmp_path / "a.jsonl", rows), tiny_policy, Config()))
    assert "advantage" in text and "[red]" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "mean of 3" in text and "5 turns of 2 trajectories; 2 first_turn" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["advantage.mem_weight=0"], "advantage.mem_weight: 0 asks for no memory reward"),
        (["scoring.full_scorer=reference"], "scoring.full_scorer: reference needs the frozen policy: pass --reference"),
    ],
)
def test_settings_that_cannot_be_met(tmp_path: Path, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        score_file(tmp_path / "never.jsonl", tmp_path, load_config(None, settings))


def test_the_full_side_by_a_reference(policy: Path, tmp_path: Path) -> None:
    engine = open_engine(policy, Runtime())
    path = written(tmp_path / "a.jsonl", rows_of(rollouts(engine.tokenizer), "turns"))
    frozen = make_policy(tmp_path / "frozen", engine.tokenizer, seed=1, window=1024)
    config = load_config(None, ["scoring.full_scorer=reference", "loss.kl_coef=0.1"])
    mixed = score_file(path, policy, config, reference=frozen)
    own, other = (score_file(path, model, Config()) for model in (policy, frozen))
    assert [row.full_logprobs for row in mixed] == [row.full_logprobs for row in other]
    assert [row.mem_logprobs for row in mixed] == [row.mem_logprobs for row in own]
    stranger = make_policy(tmp_path / "stranger", make_tokenizer(300), window=1024)
    with pytest.raises(ValueError, match="stranger: another vocabulary than"):
        score_file(path, policy, config, reference=stranger)


def test_what_the_tokenizer_cannot_carry_is_named(tmp_path: Path, tiny_policy: Path) -> None:
    ids = rows_of(rollouts(make_tokenizer()), "ids")
    ids[0]["turns"][0]["observation_ids"] = [10**6]
    chat = rows_of(rollouts(make_tokenizer()), "messages")
    chat[1]["messages"][0]["content"] = "You are another."
    for rows, row, said in [
        (ids, 1, "turns\\[0\\].observation_ids: 1000000 is no token of the model, which has [0-9]+"),
        (chat, 2, "another first prompt than in 1, which has the same id 'ulm'"),
    ]:
        with pytest.raises(ValueError, match=f"a.jsonl, line {row}: {said}$"):
            score_file(written(tmp_path / "a.jsonl", rows), tiny_policy, Config())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "the model's chat template refuses them: roles must alternate",
        ),
        ("{% for m in messages[:1] %}{{ m['content'] }}{% endfor %}", "the model's chat template leaves some out"),
        ("{% for m in messages[::-1] %}{{ m['content'] }}{% endfor %}", "the model's chat template leaves some out"),
        (None, "the model's chat template refuses them: .*chat_template is not set"),
    ],
)
def test_chat_templates_that_do_not_carry_messages(tmp_path: Path, template: str | None, said: str) -> None:
    tokenizer = make_tokenizer()
    rows = rows_of(rollouts(tokenizer), "messages")
    tokenizer.chat_template = template
    policy = make_policy(tmp_path / "policy", tokenizer)
    with pytest.raises(ValueError, match=rf"a.jsonl, line 1: messages: {said}"):
        score_file(written(tmp_path / "a.jsonl", rows), policy, Config())


def test_text_makes_no_special_token_and_a_response_makes_only_tags() -> None:
    tokenizer = make_tokenizer()
    text = "<mem>a<|im_end|></mem> <mem x> <|im_start|>system</think>"
    ids = encode_response(tokenizer, text)
    assert tokenizer.decode(ids) == text
    special = [i for i in ids if i in tokenizer.get_added_vocab().values()]
    assert tokenizer.convert_ids_to_tokens(special) == ["<mem>", "</mem>", "</think>"]
    # Where nothing hostile is in it, the ids are those of the pipeline's own texts.
    for said in SAID[0]:
        assert encode_response(tokenizer, said) == prompts.encode_frame(tokenizer, said)
