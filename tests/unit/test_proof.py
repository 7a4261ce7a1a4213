"""The proof that an engine runs what a trainer saved."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mempo import proof
from mempo.config import LossConfig, Optim
from mempo.engines import open_engine, policy_version
from mempo.packing import chain
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.trainers import open_trainer
from tests.tiny import make_policy

RUNTIME = Runtime()


def saved(policy: Path, folder: Path, version: int) -> Path:
    """``policy`` after one optimiser step, as its trainer saves it."""
    trainer = open_trainer(policy, Optim(learning_rate=1e-2), LossConfig(), RUNTIME)
    ids = list(range(30, 50))
    mask = [False, *[True] * 19]
    trainer.step([_sample(ids, mask)], objective="sft")
    trainer.save(folder, policy_version=version)
    trainer.close()
    return folder


def _sample(ids: list[int], mask: list[bool]) -> Sample:
    zeros = [0.0] * len(ids)
    return Sample(
        token_ids=ids, loss_mask=mask, old_logprobs=zeros, ref_logprobs=zeros, outcome_advantage=1.0,
        memory_advantages=zeros, weight=1.0, key="q/0/1",
    )  # fmt: skip


def test_a_trainer_writes_what_its_own_weights_give(tiny_policy: Path, tmp_path: Path) -> None:
    folder = saved(tiny_policy, tmp_path / "p", 1)
    probe = json.loads((folder / "probe.json").read_text())
    assert probe["token_ids"] == proof.probe_ids(open_engine(folder, RUNTIME).tokenizer)
    (found,) = open_engine(folder, RUNTIME).logprobs([chain(probe["token_ids"], 1)], mode="padded")
    assert probe["logprobs"] == pytest.approx(found, abs=1e-5)
    (former,) = open_engine(tiny_policy, RUNTIME).logprobs([chain(probe["token_ids"], 1)])
    assert probe["logprobs"] != pytest.approx(former, abs=1e-2)


def test_weights_of_another_folder_are_stale(tiny_policy: Path, tmp_path: Path) -> None:
    folder = saved(tiny_policy, tmp_path / "p", 4)
    engine = open_engine(folder, RUNTIME)
    shutil.copy(tiny_policy / "model.safetensors", folder)
    with pytest.raises(proof.StaleWeights, match=r"at policy version 4.*\(version 4\).*0\.001 is allowed in float32"):
        engine.load(folder)
    with pytest.raises(proof.StaleWeights):
        open_engine(folder, RUNTIME)


def test_no_number_is_no_agreement(tiny_policy: Path, tmp_path: Path) -> None:
    folder = saved(tiny_policy, tmp_path / "p", 1)

    class Silent:
        policy_version = 1
        tokenizer = open_engine(folder, RUNTIME).tokenizer

        def logprobs(self, trees: Any) -> list[list[float]]:
            return [[float("nan")] * len(tree.targets) for tree in trees]

    with pytest.raises(proof.StaleWeights, match="nan"):
        proof.prove(Silent(), folder, "float32")  # type: ignore[arg-type]


def test_bfloat16_passes_its_own_tolerance_alone(tiny_policy: Path, tmp_path: Path) -> None:
    folder = saved(tiny_policy, tmp_path / "p", 1)
    engine = open_engine(folder, RUNTIME.model_copy(update={"dtype": "bfloat16"}))
    with pytest.raises(proof.StaleWeights):
        proof.prove(engine, folder, "float32")


def test_a_folder_without_a_probe_proves_nothing(tiny_policy: Path) -> None:
    assert not (tiny_policy / proof.PROBE).exists()
    proof.prove(open_engine(tiny_policy, RUNTIME), tiny_policy, "float32")


def test_a_probe_has_a_logprob_for_each_token_but_the_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 tokens have 2 log-probabilities, not 3"):
        proof.write(tmp_path, [1, 2, 3], [-1.0, -1.0, -1.0])


WRONG = [
    *("[]", '"x"', "null", "{}", '{"token_ids": [], "logprobs": []}', '{"token_ids": [3], "logprobs": []}'),
    *('{"token_ids": [3, 4], "logprobs": []}', '{"token_ids": [3, 4], "logprobs": [-1.0, -1.0]}'),
    '{"token_ids": [3, 4], "logprobs": [-1.0], "more": 1}',
    *(f'{{"token_ids": [3, {token}], "logprobs": [-1.0]}}' for token in (-1, 512, 10**30, "true", "4.0", '"4"')),
    *(f'{{"token_ids": [3, 4], "logprobs": [{value}]}}' for value in ("null", '"-1"', "NaN", "-Infinity", "-1e999")),
]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_probe_is_named(tiny_policy: Path, tmp_path: Path, text: str) -> None:
    engine = open_engine(tiny_policy, RUNTIME)
    assert len(engine.tokenizer) <= 512
    (tmp_path / proof.PROBE).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path / proof.PROBE}: .*$"):
        proof.prove(engine, tmp_path, "float32")


@pytest.mark.parametrize("value", ["-1", "1.5", "true", '"3"', "null", "[]"])
def test_a_version_that_is_no_whole_number_is_named(tmp_path: Path, value: str) -> None:
    for text in (value, "{}", f'{{"policy_version": {value}}}'):
        (tmp_path / "trainer.json").write_text(text)
        with pytest.raises(ValueError, match=rf"^{tmp_path / 'trainer.json'}: .*$"):
            policy_version(tmp_path)


def test_a_short_window_gets_a_short_probe(tiny_tokenizer: Any, tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "p", tiny_tokenizer, window=32)
    proof.record(folder, open_engine(folder, RUNTIME))
    assert len(json.loads((folder / proof.PROBE).read_text())["token_ids"]) == 31


def test_a_missing_vllm_is_named(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"runtime\.engine: vllm is not installed here: make install-vllm"):
        open_engine(tiny_policy, RUNTIME.model_copy(update={"engine": "vllm"}))
