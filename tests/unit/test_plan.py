"""``mempo plan``: bytes by hand, activations against what torch really keeps, and the profiles that must fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mempo.cli import app
from mempo.config import Config, Lora, LossConfig, Model, Warmstart
from mempo.footprint import (
    PIECE,
    activation_bytes,
    engine_parts,
    host_bytes,
    kv_bytes,
    longest_history,
    longest_turn,
    state_parts,
)
from mempo.params import load_config
from mempo.plan import plan
from mempo.runtime import VLLM, DeepSpeed, Runtime
from mempo.shapes import shape_of
from mempo.trainers import gradient
from mempo.vllm_program import GIB
from tests.tiny import make_policy, make_tokenizer

ROOT = Path(__file__).parents[2]
PROFILES = sorted(file.parent.name for file in (ROOT / "params").glob("*/params.yaml"))
SEVEN_B = Model(path="Qwen/Qwen2.5-7B-Instruct")


def states(total: int, trained: int, **options: object) -> list[float]:
    settings = Runtime(trainer="deepspeed", dtype="bfloat16", deepspeed=DeepSpeed(**options))
    return [part.bytes for part in state_parts(total, trained, settings)]


@pytest.mark.parametrize(
    ("stage", "per_weight"),
    # 64 ranks and 7.5 billion weights are the paper's own example (arXiv 1910.02054, figure 1): 31.4, 16.6, 1.9 GB,
    # with gradients of 2 bytes; here they add up in float32, and those of one pass lie beside them
    [(1, 2 + 4 + 2 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)],
)
def test_states_by_zero_stage(stage: int, per_weight: float) -> None:
    total = 7_500_000_000
    # weights gathered at a time; the bucket of gradients
    beside = {1: 0, 2: 2 * 5e8, 3: 2 * 10**9 + 2 * 5e8}[stage]
    assert sum(states(total, total, ranks=64, stage=stage)) - beside == pytest.approx(per_weight * total)
    paper = {1: 31.4, 2: 16.6, 3: 1.9}[stage]
    more = 4 if stage == 1 else 2 / 64
    assert (per_weight - more) * total / 1e9 == pytest.approx(paper, abs=0.05)


def test_gradients_of_deepspeed_in_float32_are_of_one_kind() -> None:
    kept = Runtime(trainer="deepspeed", deepspeed=DeepSpeed(ranks=2, stage=1))
    # 4 bytes a weight, and a bucket of 4 x 5e8
    assert [part.bytes for part in state_parts(10**9, 10**9, kept)] == [4e9, 4e9 + 2e9, 6e9]


def test_offload_moves_optimiser_and_weights_to_the_host() -> None:
    total = 10**9
    assert states(total, total, ranks=2, stage=2, offload=True) == [2e9, 2e9 + 1e9, 0]
    # the weights are gathered ones, the gradients those of a bucket
    assert states(total, total, ranks=2, stage=3, offload=True) == [2e9, 1e9, 0]
    kept = Runtime(trainer="deepspeed", dtype="bfloat16", deepspeed=DeepSpeed(ranks=2, stage=3, offload=True))
    # each rank reads 4 bytes a weight; then 12 + 2 lie there, and gradients twice, at stage 2 once
    assert host_bytes(total, total, kept) == 2 * 4e9 + 22e9
    kept = kept.model_copy(update={"deepspeed": DeepSpeed(ranks=2, stage=2, offload=True)})
    assert host_bytes(total, total, kept) == 2 * 4e9 + 16e9


def test_torch_keeps_float32_and_an_adapter_trains_little() -> None:
    assert [p.bytes for p in state_parts(100, 100, Runtime())] == [400, 400, 800]
    assert [p.bytes for p in state_parts(100, 10, Runtime(dtype="bfloat16"))] == [600, 40, 80]


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}])
def test_activations_bound_what_torch_keeps(tmp_path: Path, sizes: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    folder = make_policy(tmp_path / "policy", tokenizer, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(input_ids=torch.zeros(4, 128, dtype=torch.long), use_cache=False).last_hidden_state
    measured = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)
    counted = activation_bytes(shape_of(Model(path=str(folder))), 4 * 128, 4, checkpointing=False)
    assert out.requires_grad and 0.85 * counted < measured <= counted


def test_checkpointing_keeps_an_input_a_layer_and_one_layer() -> None:
    shape = shape_of(SEVEN_B)
    # 7 x 3584 x 4 + 2 x (3 x 3584 + 4 x 512 + 4 x 18944) = 277,504 bytes a token and layer
    assert activation_bytes(shape, 10, 2, checkpointing=False) == 28 * 10 * 277_504
    assert activation_bytes(shape, 10, 2, checkpointing=True) == 10 * 277_504 + 28 * 10 * 4 * 3584


def test_cache_of_vllm_by_hand() -> None:
    shape = shape_of(SEVEN_B)
    runtime = Runtime(engine="vllm", device="cuda", dtype="bfloat16", vllm=VLLM(gpu_memory_utilization=0.5))
    # 2 x 28 layers x 512 x 2 bytes
    assert kv_bytes(shape, runtime) == 57_344
    weights, logits, cache = (part.bytes for part in engine_parts(shape, Config(runtime=runtime), 80 * GIB))
    assert (weights, logits) == (2 * 7_615_616_512, 4 * 2048 * 152_064)
    assert weights + logits + cache == 40 * GIB
    halves = runtime.model_copy(update={"vllm": VLLM(tensor_parallel=2)})
    assert kv_bytes(shape, halves) == 57_344 / 2
    servers = runtime.model_copy(update={"vllm": VLLM(servers=("http://127.0.0.1:8000",))})
    assert engine_parts(shape, Config(runtime=servers), 80 * GIB) == []


def test_what_is_held_beside_the_policy() -> None:
    """A reference is a second model of ``hf``; it lies under an adapter, and vLLM runs both in turns."""
    model, kl, adapter = Model(window=1024), LossConfig(kl_coef=0.1), Lora(rank=2)
    vllm = Runtime(engine="vllm")

    def names(phase: str, **sections: object) -> list[str]:
        made = plan(Config(model=model, **sections), 80 * GIB)
        return [part.name for part in made.parts if part.phase == phase]

    engine = ["weights", "logits", "cache"]
    assert names("rollout and scoring", loss=kl) == engine + [f"{name} of the reference" for name in engine]
    assert names("rollout and scoring", loss=kl, lora=adapter) == engine
    assert names("rollout and scoring", loss=kl, runtime=vllm) == engine
    # the warm start trains all weights, whatever the rounds train
    assert names("warm start") == [] and "optimiser" in names("warm start", lora=adapter)
    assert names("warm start", lora=adapter, warmstart=Warmstart(num_steps=0)) == []


def test_the_sizes_that_are_repeated_here_are_those_of_the_trainer() -> None:
    assert PIECE == gradient.MAX_LOGITS


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_are_good_and_fit(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "params" / profile / "params.yaml"
    for name in load_config(file).policies:
        config = load_config(file, policy=name)
    if profile != "smollm2":  # whose model is a folder that `make smollm2` makes
        assert plan(config, 80 * GIB).problems == []


def test_the_profile_of_the_paper_has_its_sizes() -> None:
    config = load_config(ROOT / "params" / "qwen2.5-7b-8gpu" / "params.yaml")
    loop, deepspeed = config.loop, config.runtime.deepspeed
    assert (loop.questions_per_round, loop.group_size, config.rollout.max_turns) == (128, 16, 8)
    assert (config.optim.learning_rate, config.mem_reward.threshold) == (1e-6, 0.5)
    assert (deepspeed.stage, deepspeed.ranks, config.runtime.dtype) == (3, 8, "bfloat16")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("runtime.vllm.tensor_parallel=8", "runtime.vllm.tensor_parallel: 28 attention heads do not divide by 8"),
        ("runtime.vllm.gpu_memory_utilization=0.06", "runtime.vllm.gpu_memory_utilization: the cache holds"),
        ("runtime.gradient_checkpointing=false", "runtime.gradient_checkpointing: update needs"),
        ("runtime.deepspeed={ranks: 8, stage: 1}", "runtime.deepspeed.stage: update needs"),
        ("runtime.deepspeed={ranks: 8, stage: 2}", None),
        ("runtime.deepspeed={ranks: 2, stage: 1}", "runtime.deepspeed.stage: update needs"),
        ("optim.tokens_per_microbatch=262144", "optim.tokens_per_microbatch: update needs"),
        ("rollout.max_turns=40", None),  # a trajectory of 41,536 tokens; the window holds 32,768
        (
            "rollout.max_response_tokens=20000",
            "rollout.max_response_tokens: a turn takes up to 41024 tokens",
        ),
        ("loss.kl_coef=0.1", None),
    ],
)
def test_what_does_not_fit_is_named_and_ends_with_code_1(setting: str, told: str | None) -> None:
    folder = str(ROOT / "params" / "qwen2.5-7b-8gpu")
    done = CliRunner().invoke(app, ["plan", "--root", folder, "--set", setting])
    assert done.exit_code == (1 if told else 0), done.output
    assert (told or "989 TFLOP/s and 3350 GB/s a device") in done.output


def test_a_round_of_the_paper_by_hand() -> None:
    """28 layers of 233,057,792 weights and a last norm are the body, 152,064 x 3,584 the head."""
    options = ["--tflops", "500", "--gbps", "2000", "--reached", "update=0.5", "--reached", "score=1"]
    done = CliRunner().invoke(app, ["plan", "--root", str(ROOT / "params" / "qwen2.5-7b-8gpu"), *options])
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line.split()}
    body, head, trajectories = 28 * 233_057_792 + 3584, 152_064 * 3584, 128 * 16
    # a first prompt of 512 and seven of 512 + 1,024; 8 x 512 are written
    prompts, written = trajectories * (512 + 7 * 1536), trajectories * 8 * 512
    read = 2 * body * prompts / (4 * 500e12)
    assert rows["prompts"][:2] == ["4", f"{2 * body * prompts:.2e}"] and rows["prompts"][4] == f"{read:.0f}"
    # 2,048 trajectories, 512 at a time, 8 turns of 512 steps; of a written token's context, on average, 1,408 + 256
    moved = 4 * 8 * 512 * 2 * 7_615_616_512 + written * (1408 + 256) * 57_344
    assert rows["decoding"][2:5] == [f"{moved:.2e}", "bytes", f"{moved / 4 / 2000e9:.0f}"]
    # vLLM reads the history before each of turns 2 to 8 with a probe of 64 after it, and each memory after the question
    scored = trajectories * (7 * (512 + 64) + 28 * 1024 + 7 * (512 + 512 + 64))
    score = 2 * (body * scored + head * trajectories * 14 * 64)
    assert rows["score"][1] == f"{score:.2e}"
    assert rows["score"][4:7] == [f"{score / 2e15:.0f}", "100%", f"{score / 2e15:.0f}"]
    # 8 a weight of the body, which is read twice, and 6 of the head
    trained = 8 * body * (prompts + written) + 6 * head * written
    assert rows["update"][:2] == ["8", f"{trained:.2e}"] and rows["update"][5] == "50%"
    assert rows["update"][6] == f"{trained / (8 * 500e12) / 0.5:.0f}"


def test_the_page_shows_what_the_command_tells() -> None:
    done = CliRunner().invoke(app, ["plan", "--root", str(ROOT / "params" / "qwen2.5-7b-8gpu")])
    told = [line.strip() for line in done.output.splitlines()]
    rows = told[next(i for i, line in enumerate(told) if line.startswith("phase ")) :]
    page = [line.strip() for line in (ROOT / "docs" / "models.md").read_text().splitlines()]
    assert len(rows) >= 7 and all(row in page for row in rows if row)


def test_a_small_cache_costs_steps_and_servers_have_one_of_their_own() -> None:
    def decoding(*settings: str) -> float:
        config = load_config(ROOT / "params" / "qwen2.5-7b-8gpu" / "params.yaml", settings)
        return next(phase.bytes for phase in plan(config, 80 * GIB).phases if phase.name == "decoding")

    weights, whole = 2 * 7_615_616_512, decoding()
    # 5.4 GiB of cache hold 404,000 tokens, 197 turns of 2,048: eleven batches for each turn, not four
    assert decoding("runtime.vllm.gpu_memory_utilization=0.1264") - whole == pytest.approx(7 * 8 * 512 * weights)
    assert decoding("runtime.vllm.servers=[http://127.0.0.1:8000]") == whole


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--reached", "scoring=0.5"], "--reached: expected PHASE=SHARE"),
        (["--reached", "update=0"], "--reached: expected PHASE=SHARE"),
        (["--reached", "update=inf"], "--reached: expected PHASE=SHARE"),
        (["--reached", "update"], "--reached: expected PHASE=SHARE"),
        (["--tflops", "inf"], "--tflops, --gbps: expected numbers above 0"),
        (["--gbps", "inf"], "--tflops, --gbps: expected numbers above 0"),
    ],
)
def test_rates_and_shares_that_are_none_are_refused(options: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--root", str(ROOT), *options])
    assert done.exit_code and told in done.output


def test_a_trajectory_longer_than_the_window_is_told_and_fits() -> None:
    done = CliRunner().invoke(app, ["plan", "--root", str(ROOT)])
    config = load_config(ROOT / "params.yaml")
    assert longest_turn(config) <= config.model.window < longest_history(config)
    assert done.exit_code == 0, done.output
    # 128 + 2 x 64 + 64; 128 + 8 x 128 and a probe of 64
    told = [line.split("│")[2].strip() for line in done.output.splitlines() if "tokens of the" in line]
    assert told == ["320", "1,216", "1,024"]


def test_all_that_was_said_is_one_turn_under_the_full_context() -> None:
    config = Config.model_validate({"rollout": {"context": "full"}, "format": {"require_memory": False}})
    (told,) = [line for line in plan(config, 80 * GIB).problems if "window" in line]
    assert told.startswith(f"rollout.max_turns: a turn takes up to {longest_history(config)} tokens")


@pytest.mark.parametrize("memory", ["inf", "nan"])
def test_memory_that_is_no_number_is_refused(memory: str) -> None:
    with pytest.raises(ValueError, match=f"--gpu-memory: expected GiB of one device, found {memory}"):
        plan(Config(), float(memory))
