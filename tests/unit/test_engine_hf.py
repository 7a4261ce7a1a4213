"""What is special to the engine ``hf``: its layouts, its cache, and the models that need the slower way."""

from __future__ import annotations

import asyncio
import logging
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from mempo.engines import Sampling, scoring
from mempo.engines.decoders import PaddedDecoder, PlainDecoder
from mempo.engines.decoding import sample
from mempo.engines.hf import HFEngine
from mempo.engines.prefixes import _segments, shared_starts
from mempo.packing import Layout, TokenTree, chain
from mempo.runtime import Runtime
from tests.tiny import make_tokenizer


@pytest.fixture(scope="module")
def engine(tiny_policy: Path) -> HFEngine:
    return HFEngine(tiny_policy, Runtime(num_threads=1))


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral whose tokens see 8 tokens back: anything laid out as plain causal would come out different."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path_factory.mktemp("sliding")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    MistralForCausalLM(
        MistralConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            sliding_window=8,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(20, 400) for _ in range(length)]


# --- layouts ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30), st.integers(0, 3), st.data())
def test_a_token_sees_its_path_to_the_root(parents: list[int], padding: int, data: st.DataObject) -> None:
    tree = TokenTree()
    for index, parent in enumerate(parents):
        tree.add([index], parent=min(parent, index - 1))
    later = [index for index, parent in enumerate(tree.parents) if parent >= 0]
    tree.targets = data.draw(st.lists(st.sampled_from(later), min_size=1, unique=True)) if later else []
    if not tree.targets:
        return
    layout = Layout.of(tree)
    read = {index for target in tree.targets for index in tree.path(tree.parents[target])}
    assert sorted([*layout.trunk, *(index for row in layout.rows for index in row)]) == sorted(read)
    assert layout.trunk.tolist() == tree.path(layout.trunk[-1]), "a causal row"
    assert len(layout.trunk) == max(len(tree.path(index)) for index in read)
    width = len(layout.trunk) + padding
    for row in layout.rows:
        roots = {next(index for index in tree.path(token) if index not in layout.trunk) for token in row}
        assert len(row) <= len(layout.trunk) or len(roots) == 1
        columns = {token: place for place, token in enumerate(layout.trunk)}
        columns |= {token: width + place for place, token in enumerate(row)}
        for line, token in zip(layout.visible(row, width), row, strict=True):
            assert set(np.flatnonzero(line)) == {columns[seen] for seen in tree.path(token)}


def test_the_layout_of_a_tree_by_hand() -> None:
    tree = TokenTree()
    root = tree.add([1, 2])  # tokens 0, 1
    tree.add([3], parent=root)  # token 2
    tree.add([4, 5, 6, 7], parent=root)  # tokens 3 to 6
    tree.add([8, 8], parent=2, target=True)  # tokens 7, 8: nothing reads the second
    tree.add([9, 9], target=True)  # tokens 9, 10: a second root
    tree.targets = [6, 8, 10]  # the deepest path that is read ends at token 5
    layout = Layout.of(tree)
    assert (layout.trunk.tolist(), [row.tolist() for row in layout.rows]) == ([0, 1, 3, 4, 5], [[2, 7, 9]])
    assert layout.visible(layout.rows[0], 6).astype(int).tolist() == [
        [1, 1, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]


def test_a_row_of_branches_is_no_longer_than_the_trunk() -> None:
    tree = TokenTree()
    root = tree.add([1, 2, 3])
    for length in (2, 3, 2, 6, 2):  # of which the last token is never read: 1, 2, 1, 5, 1
        tree.add(range(length), parent=root, target=True)
    layout = Layout.of(tree)
    assert len(layout.trunk) == 8 and [len(row) for row in layout.rows] == [5]
    tree = TokenTree()
    root = tree.add([1, 2, 3])
    for _ in range(4):
        tree.add([5, 6, 7], parent=root, target=True)
    assert [len(row) for row in Layout.of(tree).rows] == [4, 2], "a trunk of five, branches of two"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8))
def test_a_shared_start_is_a_proper_beginning_of_each_of_its_prompts(prompts: list[list[int]]) -> None:
    starts, group_of = shared_starts(prompts)
    assert len(group_of) == len(prompts)
    for prompt, group in zip(prompts, group_of, strict=True):
        assert len(starts[group]) < len(prompt)
        assert prompt[: len(starts[group])] == starts[group]


def test_shared_starts_by_hand() -> None:
    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]
    # 4 of 6 and 4 of 5 are common; the loner is cut so that its rest is as long as the longest rest, 2
    assert shared_starts([a, [9, 9, 9, 9], b]) == ([[1, 2, 3, 4], [9, 9]], [0, 1, 0])
    assert shared_starts([a, a]) == ([a[:-1]], [0, 0])
    assert shared_starts([[5]]) == ([[]], [0])
    # A header that all share does not swallow what the members of one group share
    one, two = [1, 1, 2, 2, 2, 2], [1, 1, 3, 3, 3, 3]
    starts, group_of = shared_starts([[*one, 4], [*one, 5], [*one, 6], [*two, 4], [*two, 5], [*two, 6]])
    assert (starts, group_of) == ([one, two], [0, 0, 0, 1, 1, 1])


@given(st.lists(st.integers(0, 4), max_size=7))
def test_segments_save_most(common: list[int]) -> None:
    def saved(segments: list[tuple[int, int]]) -> int:
        return sum((end - start - 1) * min(common[start : end - 1], default=0) for start, end in segments)

    count = len(common) + 1
    cuts = [[c for c in range(1, count) if bits >> (c - 1) & 1] for bits in range(2 ** (count - 1))]
    every = [list(pairwise([0, *some, count])) for some in cuts]
    found = _segments(common)
    assert found in every
    assert saved(found) == max(map(saved, every))


# --- memory ----------------------------------------------------------------------------------------------------------


def head_rows(engine: HFEngine, trees: list[TokenTree], **options: Any) -> list[int]:
    seen: list[int] = []
    head = engine.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:-1].numel()))
    engine.logprobs(trees, **options)
    hook.remove()
    return seen


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_only_answer_positions_meet_the_vocabulary(engine: HFEngine, mode: str) -> None:
    """16 contexts of 500 tokens with 10 answer tokens each: 160 rows of logits, not 8,000."""
    trees = [chain(ids(random.Random(seed), 500), 490) for seed in range(16)]
    assert sum(head_rows(engine, trees, mode=mode)) <= 16 * 11


def test_logits_come_in_bounded_pieces(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = chain(ids(random.Random(0), 60), 10)
    whole = engine.logprobs([tree])
    monkeypatch.setattr(scoring, "MAX_LOGITS", 7 * len(engine.tokenizer))
    assert head_rows(engine, [tree]) == [7] * 7 + [1]  # 50 targets
    assert engine.logprobs([tree])[0] == pytest.approx(whole[0], abs=1e-5)


def test_batches_keep_the_budget_and_the_order(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    trees = [chain(ids(rng, length), length - 3) for length in (5, 90, 17, 44, 90, 8)]
    whole = engine.logprobs(trees)
    monkeypatch.setattr(scoring, "MAX_BATCH_TOKENS", 100)
    for one, other in zip(whole, engine.logprobs(trees), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_model_in_training_that_recomputes_layers_is_scored_alike(tiny_policy: Path) -> None:
    """An adapter scores with the model that its program trains: such layers keep no keys while they train."""
    from mempo.engines import loader

    tree = TokenTree()
    branch = tree.add(ids(random.Random(0), 60))
    for seed in range(2):
        tree.add(ids(random.Random(seed), 5), parent=branch, target=True)
    assert Layout.of(tree).rows, "its keys are kept between two forwards"
    model = loader.load_model(tiny_policy, Runtime())
    scorer = HFEngine.of(model, loader.load_tokenizer(tiny_policy))
    wanted = scorer.logprobs([tree])
    model.gradient_checkpointing_enable()
    model.train()
    assert scorer.logprobs([tree]) == wanted and model.training
    model.eval()
    assert scorer.logprobs([tree]) == wanted and not model.training


# --- sampling --------------------------------------------------------------------------------------------------------


def test_inverse_transform_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.25, 0.25]])).repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits, uniforms, Sampling(1.0, 1))
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]  # never token 1, which has probability 0
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_the_last_uniform_never_leaves_the_vocabulary() -> None:
    logits = torch.full((1, 4), -50.0)
    logits[0, 0] = 0.0
    tokens, _ = sample(logits, torch.tensor([1 - 2**-53], dtype=torch.float64), Sampling(1.0, 1))
    assert 0 <= int(tokens[0]) < 4


def test_temperature_sharpens() -> None:
    # probabilities 0.8 and 0.2; at temperature 0.5 they are 0.64 / 0.68 and 0.04 / 0.68
    logits = torch.log(torch.tensor([[0.8, 0.2]]))
    _, logprobs = sample(logits, torch.tensor([0.0], dtype=torch.float64), Sampling(0.5, 1))
    assert float(logprobs.exp()[0]) == pytest.approx(0.64 / 0.68)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    for top_p, kept in ((0.4, [1]), (0.5, [1]), (0.6, [1, 2]), (0.81, [0, 1, 2])):
        tokens, _ = sample(logits.repeat(99, 1), torch.linspace(0, 0.99, 99).double(), Sampling(1.0, 1, top_p=top_p))
        assert sorted(set(tokens.tolist())) == kept


# --- models that are not plain causal --------------------------------------------------------------------------------


def test_a_sliding_window_takes_the_padded_way_by_name(sliding: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = HFEngine(sliding, Runtime(num_threads=1))
    assert not engine.plain_causal
    assert "attention of mistral is not plain causal" in caplog.text
    rng = random.Random(0)
    tree = TokenTree()
    trunk = tree.add(ids(rng, 20))
    tree.add(ids(rng, 5), parent=trunk, target=True)
    tree.add(ids(rng, 5), parent=trunk, target=True)
    alone = [chain([tree.token_ids[i] for i in tree.path(end)], 20) for end in (24, 29)]
    assert engine.logprobs([tree])[0] == pytest.approx([v for t in alone for v in engine.logprobs([t])[0]], abs=1e-5)
    with torch.inference_mode():
        assert scoring.packed_logprobs(engine.model, [tree], 1.0)[0] != pytest.approx(
            engine.logprobs([tree])[0], abs=1e-3
        )


def test_a_sliding_window_model_generates_what_it_scores(sliding: Path) -> None:
    engine = HFEngine(sliding, Runtime(num_threads=1))
    rng = random.Random(1)
    prompts = [ids(rng, length) for length in (3, 30, 12, 30)]

    async def together() -> list[Any]:
        return await asyncio.gather(
            *(engine.generate(p, seed=i, sampling=Sampling(1.0, 20)) for i, p in enumerate(prompts))
        )

    for prompt, made in zip(prompts, asyncio.run(together()), strict=True):
        assert made.logprobs == pytest.approx(
            engine.logprobs([chain([*prompt, *made.token_ids], len(prompt))])[0], abs=1e-4
        )


def test_learned_positions_and_a_row_that_ends_at_the_window(tmp_path: Path) -> None:
    """GPT-2 has a table of positions: the rows that go on must not carry a finished one past its end."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **ends)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = HFEngine(tmp_path, Runtime(num_threads=1))
    assert engine.window == 64 and not engine.plain_causal
    rng = random.Random(1)
    prompts = [ids(rng, 62), *(ids(rng, 20) for _ in range(7))]

    async def together() -> list[Any]:
        sampling = Sampling(1.0, 20, stop=())
        return await asyncio.gather(*(engine.generate(p, seed=i, sampling=sampling) for i, p in enumerate(prompts)))

    made = asyncio.run(together())
    assert len(made[0].token_ids) <= 2 < max(len(g.token_ids) for g in made)
    for prompt, each in zip(prompts, made, strict=True):
        scored = engine.logprobs([chain([*prompt, *each.token_ids], len(prompt))])[0]
        assert each.logprobs == pytest.approx(scored, abs=1e-4)


@torch.inference_mode()
def test_both_decoders_give_the_same_logits(engine: HFEngine) -> None:
    rng = random.Random(2)
    start = ids(rng, 20)
    prompts = [[*start, *ids(rng, 5)], [*start, *ids(rng, 9)], ids(rng, 3), ids(rng, 40), [7]]
    plain, padded = PlainDecoder(engine.model), PaddedDecoder(engine.model)
    torch.testing.assert_close(plain.prefill(prompts, 8), padded.prefill(prompts, 8), atol=1e-4, rtol=0)
    rows = torch.arange(len(prompts))
    for step in range(8):
        tokens = torch.tensor(ids(rng, len(rows)))
        torch.testing.assert_close(plain.step(tokens), padded.step(tokens), atol=1e-4, rtol=0)
        if step in (2, 5):
            rows = rows[::2]
            plain.keep(torch.arange(0, len(tokens), 2))
            padded.keep(torch.arange(0, len(tokens), 2))


def test_a_signal_that_ends_the_program_reaches_those_who_wait(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's handler of SIGTERM raises a BaseException wherever the program is; the event loop would swallow it."""

    class Terminated(BaseException):
        pass

    def struck(*_: Any) -> None:
        raise Terminated

    monkeypatch.setattr("mempo.engines.hf.decode", struck)

    async def ask() -> Any:
        other = Sampling(temperature=0.5, max_tokens=2)  # never begun
        asked = [engine.generate([30], seed=0, sampling=wanted) for wanted in (Sampling(1.0, 2), other)]
        return await asyncio.wait_for(asyncio.gather(*asked), 30)

    with pytest.raises(Terminated):
        asyncio.run(ask())
