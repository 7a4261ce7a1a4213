"""Profiles as a user runs them: the one pipeline of params/dvc.yaml, and the smoke script."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dulwich.ignore import IgnoreFilter
from ruamel.yaml import YAML

from mempo import local, storage
from tests.flow.small import PARAMS, ROOT, run
from tests.tiny import make_policy, make_tokenizer

PROFILE = "qwen2.5-1.5b-1gpu"  # any that starts from a model of its own will do


def pipeline() -> dict[str, dict[str, object]]:
    return YAML(typ="safe").load((ROOT / "params" / "dvc.yaml").read_text())


def test_every_profile_has_its_stages() -> None:
    """Those of the pipeline that all share, or a pipeline of its own."""
    folders = {file.parent for file in (ROOT / "params").glob("*/params.yaml")}
    own = {folder.name for folder in folders if (folder / "dvc.yaml").is_file()}
    named = set(pipeline()["vars"][0]["profiles"])
    assert named.isdisjoint(own) and named | own == {folder.name for folder in folders}


def test_git_knows_a_pipeline_and_its_lock_and_no_output() -> None:
    """DVC passes over a folder that Git ignores, and refuses a lock file that it does."""
    kept = [f"params/any/{name}" for name in ("", "params.yaml", "dvc.yaml", "dvc.lock")]
    made = [
        f"params/any/{name}/file" for name in local.MADE if not name.startswith((".", "params/", "ablation", "dvc_"))
    ]
    asked = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        input="\n".join([*kept[1:], *made]), capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert asked.stdout.split() == made
    # DVC reads the file by dulwich, whose rules are not quite Git's.
    ignored = IgnoreFilter.from_path(ROOT / ".gitignore").is_ignored
    assert not any(ignored(path) for path in kept) and all(ignored(str(Path(path).parent) + "/") for path in made)


def test_stages_name_files_and_sections_that_are_there() -> None:
    made = pipeline()
    for name, stage in made["stages"].items():
        body = stage.get("do", stage)
        files = [dep for dep in body["deps"] if "${" not in dep]
        assert all((ROOT / file).exists() for file in files), name
    for profile, told in made["vars"][0]["profiles"].items():
        sections = set(YAML(typ="safe").load((ROOT / "params" / profile / "params.yaml").read_text()))
        assert {"data", "model", "prompt", "warmstart", "runtime"} <= sections
        assert told["start"] == f"params/{profile}/pretrained" or (ROOT / told["start"]).is_file()


@pytest.mark.slow
@pytest.mark.server
def test_a_profile_runs_whole_and_tells_what_training_changed(services: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    home = repo / "params" / PROFILE
    for name in ("mempo", "flows", "tasks"):
        shutil.copytree(ROOT / name, repo / name, ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir(parents=True)
    for file in ("params.yaml", "params/dvc.yaml", ".gitignore", ".dvcignore"):
        shutil.copy(ROOT / file, repo / file)
    policy = make_policy(tmp_path / "model", make_tokenizer(), window=1024)
    settings = YAML(typ="safe").load(PARAMS)
    settings["model"] = {"path": str(policy)}
    settings["data"] |= {"num_train": 8, "max_name_tokens": 20}
    settings["warmstart"] |= {"num_steps": 2}
    settings["rollout"] = {"max_turns": 2, "max_prompt_tokens": 256}
    settings["loop"] |= {"num_rounds": 1, "dev_every": 0}
    settings["policies"] = {"mempo": {}}
    YAML().dump(settings, home / "params.yaml")
    run(["git", "init", "-q"], cwd=repo)
    run([sys.executable, "-m", "dvc", "init", "-q"], cwd=repo)
    told = run([sys.executable, "-m", "mempo.cli", "demo", "--profile", PROFILE], cwd=repo)
    assert "Stage 'pretrained'" not in told and f"train@{PROFILE}" in told
    assert "mempo, tokens a second: rollout" in told
    metrics = storage.read_json(home / "metrics" / "evaluation.json")
    assert list(metrics) == ["mempo", "pretrained", "warmstart"]
    assert (home / "report" / "index.html").is_file()
    # nothing beside the profile's folder but DVC's own
    assert not (repo / "data").exists() and not (repo / "checkpoints").exists()
    again = run([sys.executable, "-m", "mempo.cli", "demo", "--profile", PROFILE], cwd=repo)
    assert "Running stage" not in again
    assert "params/dvc.lock" in run(["git", "status", "--short", "--untracked-files=all"], cwd=repo)


def smoke(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_smoke.py"), *arguments],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return done.stdout


def test_the_smoke_script_says_why_it_skips() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert smoke().startswith("gpu_smoke: skipped, torch ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--profile", "nowhere"), "nowhere/params.yaml: no such file"),
        (("--set", "loop.group_sise=2"), "gpu_smoke: loop.group_sise: unknown key; did you mean group_size?"),
    ],
)
def test_the_smoke_script_checks_its_settings_first(arguments: tuple[str, str], told: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_smoke.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr and done.stderr.startswith("gpu_smoke: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.server
def test_the_smoke_script_on_a_cpu() -> None:
    told = smoke("--device", "cpu").splitlines()
    rounds = [line for line in told if line.startswith("round ")]
    assert len(rounds) == 2 and all("rollout" in line and "score" in line and "update" in line for line in rounds)
    assert any("mismatch/kl" in line for line in told)
