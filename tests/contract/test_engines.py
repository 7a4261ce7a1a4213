"""One suite that every engine passes. A new engine adds itself to ``ENGINES``.

vLLM takes up to half a minute to start. One engine serves the module; tests that need one of another tokenizer, shape
or setting (``other``, ``opened_like``) are left out for it unless ``MEMPO_CONTRACT=full`` (``make contract``).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mempo import proof
from mempo.engines import Engine, Generation, Sampling, open_engine
from mempo.packing import TokenTree, chain
from mempo.prompts import encode_frame
from mempo.runtime import VLLM, Runtime
from tests.served import shared
from tests.tiny import make_policy, make_tokenizer

Opener = Callable[..., Engine]


def open_hf(folder: Path, **settings: Any) -> Engine:
    return open_engine(folder, Runtime(engine="hf", **settings))


def open_vllm(folder: Path, **settings: Any) -> Engine:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (make install-vllm)")
    return open_engine(folder, Runtime(engine="vllm", vllm=VLLM(kv_cache_gib=1), **settings))


def open_vllm_server(folder: Path, **settings: Any) -> Engine:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (make install-vllm)")
    return open_engine(folder, Runtime(engine="vllm", vllm=VLLM(servers=shared(folder).urls), **settings))


ENGINES: dict[str, Opener] = {"hf": open_hf, "vllm": open_vllm, "vllm-server": open_vllm_server}
FULL = os.environ.get("MEMPO_CONTRACT") == "full"
SAMPLED = Sampling(temperature=1.0, max_tokens=12)
GREEDY = Sampling(temperature=0.0, max_tokens=12)
NOISE = 5e-5  # of log-probabilities down to -20 in float32, by another order of additions


@pytest.fixture(scope="module")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Its heads are as wide as vLLM's narrowest kernel on a CPU. Its vocabulary head is tied to its embeddings."""
    return make_policy(tmp_path_factory.mktemp("policy") / "tiny", tiny_tokenizer, head_dim=32)


@pytest.fixture(scope="module", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(kind: str, tiny_policy: Path) -> Iterator[Engine]:
    opened = ENGINES[kind](tiny_policy)
    yield opened
    opened.close()


@pytest.fixture
def oracle(tiny_policy: Path) -> Engine:
    """An independent path to the same numbers, at any temperature."""
    return open_hf(tiny_policy)


@pytest.fixture(scope="module")
def open_more(kind: str) -> Opener:
    if kind != "hf" and not FULL:
        pytest.skip("MEMPO_CONTRACT=full opens more than one engine")
    return ENGINES[kind]


@pytest.fixture(scope="module")
def other(open_more: Opener, kind: str) -> Iterator[Opener]:
    """A second engine, which runs one folder after another; a server keeps its architecture and its vocabulary."""
    opened: list[Engine] = []

    def run(folder: Path) -> Engine:
        if opened and kind != "vllm-server":
            opened[-1].load(folder)
        else:
            opened.append(open_more(folder))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def needs_temperature(kind: str, temperature: float) -> None:
    if kind != "hf" and temperature != 1:
        pytest.skip("vLLM scores at temperature 1 alone")


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
def test_logprobs_of_sampled_tokens_are_the_scored_ones(engine: Engine, oracle: Engine, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=12)
    prompts = some_prompts()
    made = generate(engine, prompts, sampling)
    trees = [chain([*p, *g.token_ids], len(p)) for p, g in zip(prompts, made, strict=True)]
    for generation, scored in zip(made, oracle.logprobs(trees, temperature=temperature), strict=True):
        assert generation.logprobs == pytest.approx(scored, abs=1e-4)
        assert len(generation.logprobs) == len(generation.token_ids) >= 1


def test_greedy_logprobs_are_of_temperature_one(engine: Engine) -> None:
    prompts = some_prompts()
    made = generate(engine, prompts, GREEDY)
    trees = [chain([*p, *g.token_ids], len(p)) for p, g in zip(prompts, made, strict=True)]
    for generation, scored in zip(made, engine.logprobs(trees), strict=True):
        assert generation.logprobs == pytest.approx(scored, abs=1e-4)


def test_greedy_takes_the_most_probable_token(engine: Engine, oracle: Engine) -> None:
    prompt = some_prompts()[0]
    (made,) = generate(engine, [prompt], GREEDY)
    context = list(prompt)
    for token in made.token_ids:
        tree = TokenTree()
        last = tree.add(context)
        for candidate in range(len(engine.tokenizer)):
            tree.add([candidate], parent=last, target=True)
        values = oracle.logprobs([tree])[0]
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


def test_same_call_same_result(engine: Engine) -> None:
    """To the bit, where a batch is a function of what is asked."""
    one, other = generate(engine, some_prompts(), SAMPLED), generate(engine, some_prompts(), SAMPLED)
    assert [made.token_ids for made in one] == [made.token_ids for made in other]
    assert engine.continuous or one == other


def test_a_smaller_max_batch_changes_no_token(engine: Engine, open_more: Opener, tiny_policy: Path) -> None:
    small = open_more(tiny_policy, max_batch=2)
    for one, other in zip(
        generate(engine, some_prompts(), SAMPLED), generate(small, some_prompts(), SAMPLED), strict=True
    ):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    small.close()


def test_samples_follow_the_distribution(engine: Engine, oracle: Engine, kind: str) -> None:
    """Single tokens: every token's share is within 5 standard errors of its probability."""
    count = 500 if kind == "vllm-server" else 4000  # each is a request over HTTP there
    prompt = some_prompts()[0]
    tree = TokenTree()
    last = tree.add(prompt)
    for candidate in range(len(engine.tokenizer)):
        tree.add([candidate], parent=last, target=True)
    probabilities = [math.exp(value) for value in oracle.logprobs([tree], temperature=0.6)[0]]
    made = generate(engine, [prompt] * count, Sampling(temperature=0.6, max_tokens=1))
    for token, p in enumerate(probabilities):
        share = sum(g.token_ids == [token] for g in made) / count
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / count) + 1 / count


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
        folder, tokenizer, hidden_size=-(-vocab // 8) * 8, num_attention_heads=2, head_dim=32,
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
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
def test_a_turn_ends_at_its_stop(other: Opener, tmp_path: Path, text: str, reason: str, tags: bool) -> None:
    """With the tags as one token or as several; the stop itself is among the tokens."""
    tokenizer = make_tokenizer(tags=tags)
    ids = encode_frame(tokenizer, "Q" + text)
    assert len(set(ids)) == len(ids)
    speaker = other(forced(tmp_path / "p", tokenizer, ids))
    start = encode_frame(tokenizer, "Q")
    (made,) = generate(speaker, [start], Sampling(temperature=0.0, max_tokens=len(ids) - 1))
    assert tokenizer.decode(made.token_ids) == text
    assert made.finish_reason == reason
    if reason != "length":  # and with room left it does not go on
        (longer,) = generate(speaker, [start], Sampling(temperature=0.0, max_tokens=50))
        assert longer == made


def test_a_stop_is_found_where_its_edge_merges_with_the_next_character(other: Opener, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tags=False)
    tokenizer.add_tokens([">\n", "><"])  # real vocabularies have such tokens
    for edge in (">\n", "><"):
        ids = [
            *encode_frame(tokenizer, "Q</answer"),
            tokenizer.convert_tokens_to_ids(edge),
            *encode_frame(tokenizer, "k"),
        ]
        assert len(set(ids)) == len(ids)
        speaker = other(forced(tmp_path / str(ord(edge[1])), tokenizer, ids))
        (made,) = generate(speaker, [ids[:1]], Sampling(temperature=0.0, max_tokens=50))
        assert tokenizer.decode(made.token_ids) == "</answer" + edge
        assert made.token_ids == ids[1:-1]  # as sampled, the overhanging character included
        assert made.finish_reason == "stop"


def test_a_stop_in_the_prompt_ends_nothing(engine: Engine) -> None:
    prompt = encode_frame(engine.tokenizer, "see </answer></search>")
    (made,) = generate(engine, [prompt], Sampling(temperature=0.0, max_tokens=3, stop=()))
    (with_stops,) = generate(engine, [prompt], Sampling(temperature=0.0, max_tokens=3))
    assert made.token_ids == with_stops.token_ids


def test_finished_rows_leave_and_the_others_go_on(other: Opener, tmp_path: Path) -> None:
    """Rows that need 1 .. 8 tokens to their end: each says its own text to the end."""
    tokenizer = make_tokenizer()
    ids = encode_frame(tokenizer, "Qabcdfgj</answer>")
    assert len(set(ids)) == len(ids)
    speaker = other(forced(tmp_path / "p", tokenizer, ids))
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
def test_packed_equals_padded_equals_one_by_one(engine: Engine, kind: str, seed: int, temperature: float) -> None:
    needs_temperature(kind, temperature)
    rng = random.Random(seed)
    trees = [random_tree(rng) for _ in range(5)] + [chain(random_ids(rng, 30), 12)]
    packed = engine.logprobs(trees, temperature=temperature, mode="packed")
    padded = engine.logprobs(trees, temperature=temperature, mode="padded")
    for tree, one, other in zip(trees, packed, padded, strict=True):
        assert len(one) == len(other) == len(tree.targets)
        assert one == pytest.approx(other, abs=NOISE)
        assert one == pytest.approx(alone(engine, tree, temperature), abs=NOISE)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_a_row_alone_equals_the_row_beside_a_longer_one(engine: Engine, mode: Any) -> None:
    rng = random.Random(7)
    short, long = random_tree(rng), chain(random_ids(rng, 300), 280)
    short_chain = chain(random_ids(rng, 100), 80)
    beside = engine.logprobs([long, short, short_chain], mode=mode)
    assert beside[1] == pytest.approx(engine.logprobs([short], mode=mode)[0], abs=NOISE)
    assert beside[2] == pytest.approx(engine.logprobs([short_chain], mode=mode)[0], abs=NOISE)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_an_answer_that_ends_in_eos_with_eos_as_padding(
    engine: Engine, other: Opener, tiny_policy: Path, tmp_path: Path, mode: Any
) -> None:
    folder = shutil.copytree(tiny_policy, tmp_path / "p")
    tokenizer = make_tokenizer(pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.pad_token_id}))
    same = other(folder)
    ids = [*random_ids(random.Random(3), 20), tokenizer.eos_token_id, tokenizer.eos_token_id]
    tree = chain(ids, 15)
    longer = chain(random_ids(random.Random(4), 66), 50)
    scored = same.logprobs([tree, longer], mode=mode)[0]
    assert len(scored) == 7  # eos tokens are targets like any other
    assert scored == pytest.approx(alone(same, tree), abs=NOISE)
    assert scored == pytest.approx(engine.logprobs([tree])[0], abs=NOISE)  # same weights, other padding


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


def test_all_engines_score_alike(engine: Engine, oracle: Engine) -> None:
    rng = random.Random(8)
    trees = [random_tree(rng) for _ in range(5)]
    for one, other in zip(engine.logprobs(trees), oracle.logprobs(trees), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_temperature_that_it_cannot_score_at_is_refused(engine: Engine, kind: str) -> None:
    if kind == "hf":
        pytest.skip("scores at every temperature")
    with pytest.raises(ValueError, match=r"rollout\.temperature"):
        engine.logprobs([chain([30, 31], 1)], temperature=0.6)


# --- other weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def next_policy(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Policy version 7: other weights everywhere, and what its trainer would have written beside them."""
    import torch
    from safetensors.torch import save_file

    folder = make_policy(tmp_path_factory.mktemp("policy") / "next", tiny_tokenizer, seed=1, head_dim=32)
    (folder / "trainer.json").write_text(json.dumps({"policy_version": 7}))
    save_file({"model.embed_tokens.weight/exp_avg": torch.zeros(1)}, folder / "trainer.safetensors")
    proof.record(folder, open_hf(folder))
    return folder


@pytest.fixture
def restored(engine: Engine, tiny_policy: Path) -> Iterator[Engine]:
    """The engine for a test that has it run another policy."""
    yield engine
    engine.load(tiny_policy)


def greedy(engine: Engine) -> list[list[int]]:
    return [made.token_ids for made in generate(engine, some_prompts(), GREEDY)]


def test_load_runs_the_other_policy(restored: Engine, tiny_policy: Path, next_policy: Path) -> None:
    """There and back: greedy tokens and log-probabilities are those of hf; no cache of the former weights is read."""
    trees = [random_tree(random.Random(seed)) for seed in range(3)]
    assert restored.policy_version == 0
    for folder, version in ((next_policy, 7), (tiny_policy, 0), (next_policy, 7)):
        restored.sleep()
        restored.load(folder)
        fresh = open_hf(folder)
        assert restored.policy_version == fresh.policy_version == version
        assert greedy(restored) == greedy(fresh)
        for one, other in zip(restored.logprobs(trees), fresh.logprobs(trees), strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    assert greedy(open_hf(tiny_policy)) != greedy(open_hf(next_policy))


def test_weights_that_are_not_those_of_the_probe_stop_the_run(
    restored: Engine, tiny_policy: Path, next_policy: Path, tmp_path: Path
) -> None:
    """A planted fault: files in which the weights stayed the former ones."""
    planted = shutil.copytree(next_policy, tmp_path / "planted")
    shutil.copy(tiny_policy / "model.safetensors", planted)
    with pytest.raises(proof.StaleWeights, match=r"planted.*version 7.*0\.001 is allowed in float32"):
        restored.load(planted)


def test_an_engine_that_keeps_its_weights_stops_the_run(
    restored: Engine, kind: str, next_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a change of weights that returns and changes none."""

    async def nothing(*_: Any) -> None: ...

    if kind != "vllm":
        pytest.skip("opens its model anew")
    monkeypatch.setattr(restored, "_change", nothing)
    with pytest.raises(proof.StaleWeights):
        restored.load(next_policy)


def test_a_lora_adapter_is_run_over_its_base(restored: Engine, tiny_policy: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from mempo import lora
    from mempo.config import Lora
    from mempo.engines import loader

    model = lora.attach(loader.load_model(tiny_policy, Runtime()), Lora(rank=2))
    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    torch.manual_seed(0)
    for value in weights.values():
        value.data.uniform_(-0.3, 0.3)
    lora.save(model, weights, tmp_path, tiny_policy)
    make_tokenizer().save_pretrained(tmp_path)
    restored.load(tmp_path)
    trees = [random_tree(random.Random(5))]
    expected = open_hf(tmp_path).logprobs(trees)
    # vLLM adds the adapter's part after the base's: another order of sums, 1.2e-4 off at a log-prob of -6.3 once.
    close = pytest.approx(expected[0], rel=1e-4, abs=1e-4)
    assert restored.logprobs(trees)[0] == close
    frozen, alone = restored.base(), open_hf(tiny_policy)
    assert frozen is not None and alone.base() is None
    assert expected[0] != pytest.approx(alone.logprobs(trees)[0], abs=1e-2)
    assert frozen.logprobs(trees)[0] == pytest.approx(alone.logprobs(trees)[0], abs=1e-4)
    assert restored.logprobs(trees)[0] == close  # and it goes on


@pytest.mark.parametrize("ending", ["engine.close(); engine.close()", "raise RuntimeError('of the run')"])
def test_no_process_is_left(open_more: Opener, kind: str, tiny_policy: Path, ending: str) -> None:
    if kind != "vllm":
        pytest.skip("starts no process of its own")
    code = f"""
import sys
from pathlib import Path
from mempo.engines import open_engine
from mempo.runtime import Runtime
if __name__ == "__main__":
    engine = open_engine(Path(sys.argv[1]), Runtime(engine="vllm"))
    {ending}
"""
    child = subprocess.Popen([sys.executable, "-c", code, str(tiny_policy)], start_new_session=True)
    assert child.wait(300) == int("raise" in ending)
    left = [process for process in psutil.process_iter() if _session(process) == child.pid]
    _, alive = psutil.wait_procs(left, timeout=30)  # Python's own tracker of shared memory ends a moment later
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def test_vllm_runs_on_the_device_that_is_asked_for_or_says_so(tiny_policy: Path) -> None:
    pytest.importorskip("vllm")
    absent = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ValueError, match=rf"runtime\.device: '{absent}' is asked for, and this vLLM runs on"):
        open_vllm(tiny_policy, device=absent)
