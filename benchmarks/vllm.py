"""The engine ``vllm`` against ``LLM.generate`` of vLLM itself, given the same requests at once.

Both engines run the same folder with the same settings in one program, each with a process of its own, so the clock on
the wall is read and not CPU-seconds. A request is a prompt in tokens and a seed; the log-prob of each sampled token is
asked for. Prompts are in both caches from the call that does not count.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, Skipped
from benchmarks.synthetic import demo_policy, trajectories
from benchmarks.timing import side_by_side
from mempo import vllm_program as program
from mempo.engines import Engine, Generation, Sampling, open_engine
from mempo.engines.loader import end_ids, load_outline
from mempo.engines.vllm_requests import sampling_fields
from mempo.runtime import VLLM, Runtime

NEW_TOKENS, WINDOW = 48, 512
RUNTIME = Runtime(engine="vllm", vllm=VLLM(kv_cache_gib=1))


def run(folder: Path, full: bool) -> Iterator[Row]:
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed here: make install-vllm")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that start
    policy = demo_policy(folder, window=WINDOW)
    with closing(open_engine(policy, RUNTIME)) as engine:
        made, _ = trajectories(2, 16 if full else 8, 8, len(engine.tokenizer))
        prompts = [trajectory.turns[1].prompt_ids for trajectory in made]
        raw = _raw(policy)
        try:
            yield _row(engine, raw, policy, prompts)
        finally:
            raw.llm_engine.engine_core.shutdown()


def _row(engine: Engine, raw: Any, policy: Path, prompts: list[list[int]]) -> Row:
    from vllm import SamplingParams

    sampling = Sampling(temperature=1.0, max_tokens=NEW_TOKENS)
    ends = end_ids(load_outline(policy), engine.tokenizer)
    fields = [
        SamplingParams(**sampling_fields(sampling, seed=seed, max_tokens=NEW_TOKENS, end_ids=ends))
        for seed in range(len(prompts))
    ]
    found: dict[str, list[tuple[list[int], float]]] = {}

    async def together() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(p, seed=i, sampling=sampling) for i, p in enumerate(prompts)))

    def ours() -> None:
        found["ours"] = [(made.token_ids, sum(made.logprobs)) for made in asyncio.run(together())]

    def theirs() -> None:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        made = [answer.outputs[0] for answer in raw.generate(asked, fields, use_tqdm=False)]
        found["theirs"] = [(list(output.token_ids), output.cumulative_logprob) for output in made]

    fast, slow = side_by_side(ours, theirs, repeats=5, clock=time.perf_counter)
    same = _agree(found["ours"], found["theirs"])
    counts = {side: sum(len(ids) for ids, _ in rows) for side, rows in found.items()}
    rates = {"ours": counts["ours"] / fast, "theirs": counts["theirs"] / slow}
    detail = (
        f"{rates['ours']:,.0f} tokens/s on the clock against {rates['theirs']:,.0f} of `LLM.generate`; {len(prompts)} "
        f"requests at once, {counts['ours']:,} and {counts['theirs']:,} tokens, {same} answers token for token equal"
    )
    return Row("decoding, engine vllm against vLLM itself", rates["ours"] / rates["theirs"], "higher", detail, 0.9)


def _agree(ours: list[tuple[list[int], float]], theirs: list[tuple[list[int], float]]) -> int:
    """How many answers are equal. Raises where under nine of ten are: one rounding error may change a whole answer."""
    equal = [(a, b) for a, b in zip(ours, theirs, strict=True) if a[0] == b[0]]
    worst = max((abs(a[1] - b[1]) for a, b in equal), default=0.0)
    if len(equal) < 0.9 * len(ours) or worst > 1e-2:
        raise AssertionError(f"{len(equal)} of {len(ours)} answers agree, sums of log-probs within {worst:.2g}")
    return len(equal)


def _raw(policy: Path) -> Any:
    """vLLM opened as mempo/engines/vllm.py opens it, less what changes weights."""
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return LLM(
        model=str(policy), dtype="float32", max_model_len=WINDOW, max_num_seqs=RUNTIME.max_batch,
        max_num_batched_tokens=program.step_tokens(RUNTIME, WINDOW, on_cpu=True), enable_chunked_prefill=False,
        distributed_executor_backend=UniProcExecutor, kv_cache_memory_bytes=program.GIB, enforce_eager=True,
        enable_prefix_caching=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
