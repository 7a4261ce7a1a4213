"""One suite that every engine passes. A new engine adds itself to ``ENGINES``."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mempo.engines import Engine, Generation, Sampling, open_engine
from mempo.packing import TokenTree, chain
from mempo.prompts import encode_frame
from mempo.runtime import Runtime
from tests.tiny import make_policy, make_tokenizer

ENGINES = ("hf",)
SAMPLED = Sampling(temperature=1.0, max_tokens=12)
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_policy: Path) -> Iterator[Engine]:
    opened = open_engine(tiny_policy, Runtime(engine=request.param, num_threads=1))
    yield opened
    opened.close()


def opened_like(engine: Engine, folder: Path, **runtime: Any) -> Engine:
    kind = next(name for name in ENGINES if name in type(engine).__module__)
    return open_engine(folder, Runtime(engine=kind, num_threads=1, **runtime))


def generate(engine: Engine, prompts: list[list[int]], sampling: Sampling, seed: int = 0) -> list[Generation]:
    async def together() -> list[Generation]:
        return await asyncio.gather(
            *(engine.generate(prompt, seed=seed + index, sampling=sampling) for index, prompt in enumerate(prompts))
        )

    return asyncio.run(together())


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(20, 400) for _ in range(length)]


def some_prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    """Prompts of 5 to 60 tokens; the first three share their beginning, the first two are equal."""
    rng = random.Random(seed)
    start = random_ids(rng, 30)
    shared = [*start, *random_ids(rng, 9)]
    return [
        shared,
        list(shared),
        [*start, *random_ids(rng, 4)],
        *(random_ids(rng, rng.randint(5, 60)) for _ in range(count - 3)),
    ]


def random_tree(rng: random.Random) -> TokenTree:
    """A trajectory-like tree with probes on its trunk, a second level of branches, and targets inside the trunk."""
    tree = TokenTree()
    trunk = tree.add(random_ids(rng, rng.randint(1, 20)))
    for _ in range(rng.randint(1, 4)):
        probe = tree.add(random_ids(rng, rng.randint(1, 8)), parent=trunk, target=True)
        if rng.random() < 0.5:
            tree.add(random_ids(rng, rng.randint(1, 4)), parent=probe, target=True)
            tree.add(random_ids(rng, rng.randint(1, 4)), parent=probe, target=rng.random() < 0.5)
        trunk = tree.add(random_ids(rng, rng.randint(1, 15)), parent=trunk, target=rng.random() < 0.5)
    return tree


def alone(engine: Engine, tree: TokenTree, temperature: float = 1.0) -> list[float]:
    """Every target by itself: its path written out as one chain, in a call of its own."""
    values = []
    for target in tree.targets:
        ids = [tree.token_ids[index] for index in tree.path(target)]
        values += engine.logprobs([chain(ids, len(ids) - 1)], temperature=temperature)[0]
    return values


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_sampled_tokens_are_the_scored_ones(engine: Engine, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=12)
    prompts = some_prompts()
    made = generate(engine, prompts, sampling)
    trees = [chain([*p, *g.token_ids], len(p)) for p, g in zip(prompts, made, strict=True)]
    for generation, scored in zip(made, engine.logprobs(trees, temperature=temperature), strict=True):
        assert generation.logprobs == pytest.approx(scored, abs=1e-4)
        assert len(generation.logprobs) == len(generation.token_ids) >= 1


def test_greedy_logprobs_are_of_temperature_one(engine: Engine) -> None:
    prompts = some_prompts()
    made = generate(engine, prompts, GREEDY)
    trees = [chain([*p, *g.token_ids], len(p)) for p, g in zip(prompts, made, strict=True)]
    for generation, scored in zip(made, engine.logprobs(trees), strict=True):
        assert generation.logprobs == pytest.approx(scored, abs=1e-4)


def test_greedy_takes_the_most_probable_token(engine: Engine) -> None:
    prompt = some_prompts()[0]
    (made,) = generate(engine, [prompt], GREEDY)
    context = list(prompt)
    for token in made.token_ids:
        tree = TokenTree()
        last = tree.add(context)
        for candidate in range(len(engine.tokenizer)):
            tree.add([candidate], parent=last, target=True)
        values = engine.logprobs([tree])[0]
        assert math.fsum(map(math.exp, values)) == pytest.approx(1, abs=1e-4)  # the whole vocabulary
        assert values[token] == pytest.approx(max(values), abs=1e-5)
        context.append(token)


def test_a_row_depends_on_its_prompt_and_seed_alone(engine: Engine) -> None:
    prompts = some_prompts(8)
    together = generate(engine, prompts, SAMPLED)
    for index, prompt in enumerate(prompts):
        (single,) = generate(engine, [prompt], SAMPLED, seed=index)
        assert single.token_ids == together[index].token_ids
        assert single.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)
    assert together[0].token_ids != together[1].token_ids  # equal prompts, other seeds


def test_same_call_same_result_to_the_bit(engine: Engine) -> None:
    assert generate(engine, some_prompts(), SAMPLED) == generate(engine, some_prompts(), SAMPLED)


def test_a_smaller_max_batch_changes_no_token(engine: Engine, tiny_policy: Path) -> None:
    small = opened_like(engine, tiny_policy, max_batch=2)
    for one, other in zip(
        generate(engine, some_prompts(), SAMPLED), generate(small, some_prompts(), SAMPLED), strict=True
    ):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_samples_follow_the_distribution(engine: Engine) -> None:
    """4,000 single tokens: every token's share is within 5 standard errors of its probability."""
    prompt = some_prompts()[0]
    tree = TokenTree()
    last = tree.add(prompt)
    for candidate in range(len(engine.tokenizer)):
        tree.add([candidate], parent=last, target=True)
    probabilities = [math.exp(value) for value in engine.logprobs([tree], temperature=0.6)[0]]
    made = generate(engine, [prompt] * 4000, Sampling(temperature=0.6, max_tokens=1))
    for token, p in enumerate(probabilities):
        share = sum(g.token_ids == [token] for g in made) / 4000
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / 4000) + 1 / 4000


def test_top_k_and_top_p_sample_inside_and_renormalise(engine: Engine) -> None:
    prompts = [some_prompts()[0]] * 64
    best = generate(engine, prompts[:1], Sampling(temperature=1.0, max_tokens=4, top_k=1))[0]
    assert best.token_ids == generate(engine, prompts[:1], Sampling(temperature=0.0, max_tokens=4))[0].token_ids
    assert best.logprobs == pytest.approx([0.0] * len(best.token_ids))  # one token left: probability 1
    nucleus = generate(engine, prompts, Sampling(temperature=1.0, max_tokens=1, top_p=0.5))
    whole = generate(engine, prompts, Sampling(temperature=1.0, max_tokens=1))
    seen = {g.token_ids[0]: math.exp(g.logprobs[0]) for g in nucleus}
    assert math.fsum(seen.values()) <= 1 + 1e-5
    assert len(seen) < len({g.token_ids[0] for g in whole})


def test_requests_with_different_settings_do_not_mix(engine: Engine) -> None:
    async def both() -> tuple[Generation, Generation]:
        prompt = some_prompts()[3]
        return await asyncio.gather(
            engine.generate(prompt, seed=5, sampling=GREEDY), engine.generate(prompt, seed=5, sampling=SAMPLED)
        )

    greedy, sampled = asyncio.run(both())
    assert greedy.token_ids == generate(engine, [some_prompts()[3]], GREEDY, seed=5)[0].token_ids
    assert sampled.token_ids == generate(engine, [some_prompts()[3]], SAMPLED, seed=5)[0].token_ids


# --- what ends a turn ------------------------------------------------------------------------------------------------


def forced(folder: Path, tokenizer: Any, text_ids: list[int], **sizes: Any) -> Path:
    """A policy that says ``text_ids`` (all different) greedily, after any prompt that ends in their predecessor.

    Attention and MLP write nothing; embeddings are one-hot by token, and the head sends each token to its successor.
    """
    import torch
    from safetensors.torch import load_file, save_file

    vocab = len(tokenizer)
    make_policy(
        folder, tokenizer, hidden_size=-(-vocab // 8) * 8, num_attention_heads=2, tie_word_embeddings=False, **sizes
    )
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    width = weights["model.embed_tokens.weight"].shape[1]
    weights["model.embed_tokens.weight"] = torch.eye(vocab, width)
    head = torch.zeros(vocab, width)
    for former, token in pairwise(text_ids):
        head[token, former] = 10.0
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("text", "reason"),
    [("X</search>", "stop"), ("X</answer>", "stop"), ("X<|im_end|>", "eos"), ("ab</", "length")],
)
@pytest.mark.parametrize("tags", [True, False])
def test_a_turn_ends_at_its_stop(engine: Engine, tmp_path: Path, text: str, reason: str, tags: bool) -> None:
    """With the tags as one token or as several; the stop itself is among the tokens."""
    tokenizer = make_tokenizer(tags=tags)
    ids = encode_frame(tokenizer, "Q" + text)
    assert len(set(ids)) == len(ids)
    speaker = opened_like(engine, forced(tmp_path / "p", tokenizer, ids))
    start = encode_frame(tokenizer, "Q")
    (made,) = generate(speaker, [start], Sampling(temperature=0.0, max_tokens=len(ids) - 1))
    assert tokenizer.decode(made.token_ids) == text
    assert made.finish_reason == reason
    if reason != "length":  # and with room left it does not go on
        (longer,) = generate(speaker, [start], Sampling(temperature=0.0, max_tokens=50))
        assert longer == made


def test_a_stop_is_found_where_its_edge_merges_with_the_next_character(engine: Engine, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tags=False)
    tokenizer.add_tokens([">\n", "><"])  # real vocabularies have such tokens
    for edge in (">\n", "><"):
        ids = [
            *encode_frame(tokenizer, "Q</answer"),
            tokenizer.convert_tokens_to_ids(edge),
            *encode_frame(tokenizer, "k"),
        ]
        assert len(set(ids)) == len(ids)
        speaker = opened_like(engine, forced(tmp_path / str(ord(edge[1])), tokenizer, ids))
        (made,) = generate(speaker, [ids[:1]], Sampling(temperature=0.0, max_tokens=50))
        assert tokenizer.decode(made.token_ids) == "</answer" + edge
        assert made.token_ids == ids[1:-1]  # as sampled, the overhanging character included
        assert made.finish_reason == "stop"


def test_a_stop_in_the_prompt_ends_nothing(engine: Engine) -> None:
    prompt = encode_frame(engine.tokenizer, "see </answer></search>")
    (made,) = generate(engine, [prompt], Sampling(temperature=0.0, max_tokens=3, stop=()))
    (with_stops,) = generate(engine, [prompt], Sampling(temperature=0.0, max_tokens=3))
    assert made.token_ids == with_stops.token_ids


def test_finished_rows_leave_and_the_others_go_on(engine: Engine, tmp_path: Path) -> None:
    """Rows that need 1 .. 8 tokens to their end: each says its own text to the end."""
    tokenizer = make_tokenizer()
    ids = encode_frame(tokenizer, "Qabcdfgj</answer>")
    assert len(set(ids)) == len(ids)
    speaker = opened_like(engine, forced(tmp_path / "p", tokenizer, ids))
    made = generate(speaker, [ids[: index + 1] for index in range(len(ids) - 1)], Sampling(0.0, 50))
    assert [g.token_ids for g in made] == [ids[index + 1 :] for index in range(len(ids) - 1)]
    assert {g.finish_reason for g in made} == {"stop"}


def test_the_window_limits_generation(engine: Engine) -> None:
    rng = random.Random(1)
    (made,) = generate(engine, [random_ids(rng, engine.window - 2)], Sampling(1.0, 50, stop=()))
    assert len(made.token_ids) <= 2
    with pytest.raises(ValueError, match="no room"):
        generate(engine, [random_ids(rng, engine.window)], SAMPLED)
    with pytest.raises(ValueError, match="no room"):
        generate(engine, [[]], SAMPLED)


def test_one_bad_request_does_not_hang_the_others(engine: Engine) -> None:
    async def both() -> list[Any]:
        good = engine.generate(some_prompts()[3], seed=0, sampling=SAMPLED)
        bad = engine.generate([10**9], seed=0, sampling=SAMPLED)
        return await asyncio.wait_for(asyncio.gather(good, bad, return_exceptions=True), 60)

    results = asyncio.run(both())
    assert isinstance(results[1], Exception)


# --- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_packed_equals_padded_equals_one_by_one(engine: Engine, seed: int, temperature: float) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng) for _ in range(5)] + [chain(random_ids(rng, 30), 12)]
    packed = engine.logprobs(trees, temperature=temperature, mode="packed")
    padded = engine.logprobs(trees, temperature=temperature, mode="padded")
    for tree, one, other in zip(trees, packed, padded, strict=True):
        assert len(one) == len(other) == len(tree.targets)
        assert one == pytest.approx(other, abs=1e-5)
        assert one == pytest.approx(alone(engine, tree, temperature), abs=1e-5)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_a_row_alone_equals_the_row_beside_a_longer_one(engine: Engine, mode: Any) -> None:
    rng = random.Random(7)
    short, long = random_tree(rng), chain(random_ids(rng, 300), 280)
    short_chain = chain(random_ids(rng, 100), 80)
    beside = engine.logprobs([long, short, short_chain], mode=mode)
    assert beside[1] == pytest.approx(engine.logprobs([short], mode=mode)[0], abs=1e-5)
    assert beside[2] == pytest.approx(engine.logprobs([short_chain], mode=mode)[0], abs=1e-5)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_an_answer_that_ends_in_eos_with_eos_as_padding(
    engine: Engine, tiny_policy: Path, tmp_path: Path, mode: Any
) -> None:
    folder = shutil.copytree(tiny_policy, tmp_path / "p")
    tokenizer = make_tokenizer(pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.pad_token_id}))
    same = opened_like(engine, folder)
    ids = [*random_ids(random.Random(3), 20), tokenizer.eos_token_id, tokenizer.eos_token_id]
    tree = chain(ids, 15)
    longer = chain(random_ids(random.Random(4), 66), 50)
    scored = same.logprobs([tree, longer], mode=mode)[0]
    assert len(scored) == 7  # eos tokens are targets like any other
    assert scored == pytest.approx(alone(same, tree), abs=1e-5)
    assert scored == pytest.approx(engine.logprobs([tree])[0], abs=1e-5)  # same weights, other padding


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_a_target_at_a_root_is_refused(engine: Engine, mode: Any) -> None:
    with pytest.raises(ValueError, match="tree 1: a target at the root"):
        engine.logprobs([chain([30, 31], 1), chain([30, 31], 0)], mode=mode)


def test_a_tree_deeper_than_the_window_is_refused(engine: Engine) -> None:
    ids = random_ids(random.Random(0), engine.window + 1)
    with pytest.raises(ValueError, match=f"window of {engine.window}"):
        engine.logprobs([chain(ids, len(ids) - 1)])
    assert len(engine.logprobs([chain(ids[:-1], len(ids) - 2)])[0]) == 1


def test_nothing_to_score(engine: Engine) -> None:
    assert engine.logprobs([]) == []
    assert engine.logprobs([chain([30, 31], 2), TokenTree()]) == [[], []]


def test_the_policy_version_is_the_trainers(engine: Engine, tiny_policy: Path, tmp_path: Path) -> None:
    assert engine.policy_version == 0
    shutil.copytree(tiny_policy, tmp_path / "p")
    (tmp_path / "p" / "trainer.json").write_text(json.dumps({"policy_version": 7}))
    assert opened_like(engine, tmp_path / "p").policy_version == 7
