"""Steps of a run that trains a LoRA adapter: small policies, one copy of the weights under them, an ordinary result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mempo import lora, storage
from mempo.config import Config
from mempo.engines import BaseScorer, open_engine
from mempo.packing import chain
from mempo.records import Sample
from mempo.warmstart import last_saved
from mempo.workspace import Run, Workspace
from tasks import engines, round as steps
from tasks.parts import policy_engine
from tasks.record import copy_policy

pytest.importorskip("peft")
TREES = [chain([30, 77, 200, 41, 5, 300], 1)]


@pytest.fixture
def run(tiny_policy: Path, tmp_path: Path) -> Run:
    """Two rounds of which nothing but the samples is left."""
    workspace = Workspace(tmp_path / "w")
    shutil.copytree(tiny_policy, workspace.checkpoint("warmstart"))
    sections = {"optim": {"learning_rate": 1e-2}, "loss": {"max_mismatch": None}, "lora": {"rank": 4, "alpha": 8}}
    made = workspace.run("mempo", Config.model_validate(sections), {})
    for index in range(2):
        samples = [
            Sample(f"q/{i}/1", [5 + index, 20, 30, 40], [0, 0, 1, 1], [0.0, 0.0, -3.0, -3.0], [0.0] * 4, sign,
                   [0.0] * 4, 0.25)
            for i, sign in enumerate((1.0, -1.0))
        ]  # fmt: skip
        storage.write_records(made.round(index) / "samples.parquet", samples)
    return made


def test_policies_are_adapters_and_one_that_was_pruned_is_made_again_to_the_bit(run: Run) -> None:
    first = {version: storage.content_hash(steps.remake(run, version)) for version in (1, 2)}
    for version in (1, 2):
        assert not (run.policy(version) / "model.safetensors").exists()
        assert lora.base_of(run.policy(version)) == run.policy(0).resolve()
        shutil.rmtree(run.policy(version))
    assert storage.content_hash(steps.remake(run, 2)) == first[2] != first[1]


def test_the_reference_is_what_the_engine_holds_already(run: Run) -> None:
    engines.open_frozen.cache_clear()
    steps.remake(run, 2)
    alone = open_engine(run.policy(0), run.config.runtime).logprobs(TREES)
    for version in (0, 2):
        engine = policy_engine(run.policy(version), run)
        reference = engines.reference(run.policy(version), run.policy(0), run.config.runtime)
        assert reference is engine if version == 0 else isinstance(reference, BaseScorer)
        assert reference.logprobs(TREES) == alone
        assert (engine.logprobs(TREES) == alone) == (version == 0)
        assert engine.policy_version == version
    assert engines.open_frozen.cache_info().currsize == 0


def test_what_is_published_is_an_ordinary_folder(run: Run, tmp_path: Path) -> None:
    copy_policy(steps.remake(run, 2), tmp_path / "final")
    shutil.rmtree(run.workspace.root)  # it stands by itself
    assert not lora.is_adapter(tmp_path / "final")
    assert not list((tmp_path / "final").glob("adapter*")) + list((tmp_path / "final").glob("trainer.safetensors"))
    assert open_engine(tmp_path / "final", run.config.runtime).policy_version == 2


def test_a_warm_start_from_an_adapter_is_refused(run: Run) -> None:
    adapter = steps.remake(run, 1)
    config = Config.model_validate({"model": {"path": str(adapter)}})
    with pytest.raises(ValueError, match=rf"model\.path: {adapter} holds a LoRA adapter"):
        last_saved(run.workspace.run("warmstart", config, {}))
