"""Another setting is another run folder; a longer run is the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo import storage
from mempo.config import Config
from mempo.workspace import Workspace


def folder(root: Path, inputs: dict[str, str] | None = None, **sections: object) -> str:
    return Workspace(root).run("mempo", Config.model_validate(sections), inputs or {"data": "a"}).folder.name


def test_what_changes_no_result_keeps_the_folder(tmp_path: Path):
    plain = folder(tmp_path)
    assert folder(tmp_path, loop={"num_rounds": 99, "keep_every": 3}) == plain
    assert folder(tmp_path, tracking={"experiment": "x"}, evaluation={"num_questions": 4}) == plain


@pytest.mark.parametrize(
    "sections",
    [{"loop": {"seed": 1}}, {"optim": {"learning_rate": 2e-4}}, {"mem_reward": {"mask": "none"}},
     {"runtime": {"num_threads": 1}}, {"rollout": {"temperature": 0.9}}],
)  # fmt: skip
def test_what_changes_results_starts_another(tmp_path: Path, sections: dict[str, object]):
    assert folder(tmp_path, **sections) != folder(tmp_path)


def test_other_data_starts_another(tmp_path: Path):
    assert folder(tmp_path, {"data": "b"}) != folder(tmp_path)


def test_the_resolved_configuration_is_written_first(tmp_path: Path):
    run = Workspace(tmp_path).run("mempo", Config(), {"data": "a"})
    written = storage.read_json(run.config_file)
    assert written["config"]["loop"]["group_size"] == Config().loop.group_size
    assert written["versions"]["torch"].startswith("2.")
