"""Tracking against a real SQLite store: runs that are resumed, killed, deleted; hostile names; tables and traces."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import zlib
from pathlib import Path
from typing import Any

import mlflow
import pytest
from hypothesis import given, strategies as st
from matplotlib.figure import Figure

from mempo.config import Config
from mempo.samples import build
from mempo.viewer import Scene, scenes
from tasks import chart_view, traces, tracking
from tests.unit.builders import question, trajectory, turn, turn_score

ROOT = Path(__file__).parents[2]
CONFIG = Config().model_dump(mode="json")
HOUR = 1_796_000_000_000


def opened(*arguments: Any, **options: Any) -> tracking.TrackedRun:
    run = tracking.open_tracking(*arguments, **options)
    tracking.begin(run)
    return run


def log(run: tracking.TrackedRun, count: int) -> None:
    """What the store lacks of ``count`` rounds."""
    for index in range(run.last_logged + 1, count):
        tracking.log_metrics(run, {"mem_reward/p50": index / 10, "em": 0.5}, index, HOUR + index)
        run.log_through(index)


def close(run: tracking.TrackedRun) -> None:
    run.become("FINISHED")
    tracking.end(run)


def history(run: tracking.TrackedRun, name: str) -> list[tuple[int, float]]:
    assert run.run_id
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run.run_id, name)]


def look(run: tracking.TrackedRun) -> Any:
    assert run.run_id
    return mlflow.MlflowClient().get_run(run.run_id)


def test_a_run_is_flat_named_and_ends(store: Path, tmp_path: Path) -> None:
    run = opened("mempo", CONFIG, {"policy": "mempo"}, tmp_path / "run" / "mlflow.json")
    log(run, 3)
    close(run)
    found = look(run)
    assert (found.info.run_name, found.info.status) == ("mempo", "FINISHED")
    assert found.data.tags["policy"] == "mempo" and "mlflow.parentRunId" not in found.data.tags
    assert found.data.params["loop.group_size"] == str(Config().loop.group_size)
    assert len(found.data.params) == len(tracking.flat_params(CONFIG)) > 100
    assert history(run, "mem_reward/p50") == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert found.info.artifact_uri.startswith((store / "artifacts").as_uri())


def test_rounds_logged_twice_leave_one_point_and_resume_finds_the_run(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "mlflow.json"
    first = opened("mempo", CONFIG, {}, file)
    log(first, 3)
    again = opened("mempo", CONFIG | {"extra": 1}, {}, file)
    assert (again.run_id, again.last_logged) == (first.run_id, 2)
    again.log_through(0)  # as after a kill between the call and the note of it
    log(again, 5)
    assert history(again, "em") == [(index, 0.5) for index in range(5)]


def test_a_killed_run_is_not_left_running(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "mlflow.json"
    code = f"""
        import time, mlflow
        from pathlib import Path
        from tasks import tracking
        run = tracking.open_tracking("mempo", {{"a": 1}}, {{}}, Path({str(file)!r}))
        tracking.log_metrics(run, {{"em": 0.5, "mem_reward/p50": 0.0}}, 0, {HOUR})
        run.log_through(0)
        print("logged", flush=True); time.sleep(120)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "logged\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    run = opened("mempo", {"a": 1}, {}, file)
    assert run.last_logged == 0 and look(run).info.status == "RUNNING"
    log(run, 2)
    close(run)
    assert look(run).info.status == "FINISHED"
    assert history(run, "em") == [(0, 0.5), (1, 0.5)]
    assert len(mlflow.MlflowClient().search_runs([look(run).info.experiment_id])) == 1


def test_a_run_made_just_before_a_kill_gets_its_params(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "mlflow.json"
    run = opened("mempo", {}, {}, file)  # as if killed before the first call after making the run
    again = opened("mempo", {"a": 1}, {}, file)
    assert again.run_id == run.run_id and look(again).data.params == {"a": "1"}


def test_a_run_deleted_from_the_store_is_logged_anew(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "mlflow.json"
    run = opened("mempo", {}, {}, file)
    log(run, 3)
    assert run.run_id
    mlflow.MlflowClient().delete_run(run.run_id)
    again = opened("mempo", {}, {}, file)
    log(again, 3)
    assert again.run_id != run.run_id
    assert len(history(again, "em")) == 3


def test_no_file_holds_the_password_of_the_store(store: Path, tmp_path: Path) -> None:
    mlflow.set_tracking_uri("http://me:hunter2@127.0.0.1:9")
    tracking.open_tracking("mempo", {}, {}, tmp_path / "mlflow.json").log_through(3)
    assert "hunter2" not in (tmp_path / "mlflow.json").read_text()


def test_another_store_gets_the_whole_run(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "mlflow.json"
    first = opened("mempo", {}, {}, file)
    log(first, 2)
    mlflow.set_tracking_uri(f"sqlite:///{store}/other.db")
    run = opened("mempo", {}, {}, file)
    assert run.last_logged == -1
    log(run, 2)
    assert history(run, "em") == [(0, 0.5), (1, 0.5)]


def test_hostile_names_and_values_are_logged_by_the_stated_rules(store: Path, tmp_path: Path) -> None:
    config = {
        "long": "x" * 7000, "bad@name": 1, "db": {"url": "postgresql://me:hunter2@host/db", "password": "hunter2"},
        "hub": {"api_key": "hunter2", "access_token": "hunter2"}, "max_prompt_tokens": 128, "empty": {}, "none": None,
        **{f"p{index}": index for index in range(250)},
    }  # fmt: skip
    run = opened("mempo", config, {"t": "y" * 9000}, tmp_path / "mlflow.json")
    params = look(run).data.params
    assert params["long"] == "x" * 6000 and params["bad_name"] == "1" and params["p249"] == "249"
    assert params["db.url"] == "postgresql://me:***@host/db" and params["max_prompt_tokens"] == "128"
    assert "hunter2" not in str(look(run).to_dictionary())
    odd = {"mem@2": 1.0, "/a//../b": 2.0, "汉 (x)": 3.0, "nan": math.nan, "inf": -math.inf, "n" * 300: 4.0}
    tracking.log_metrics(run, odd, 0, HOUR)
    metrics = look(run).data.metrics
    assert metrics == {"mem_2": 1.0, "a/b": 2.0, "汉 _x_": 3.0, "not_finite": 2.0, "n" * 250: 4.0}
    tracking.log_metrics(run, {f"m/{index}": 1.0 for index in range(1500)}, 1, HOUR)
    assert len(look(run).data.metrics) == 5 + 1500


@given(st.text(min_size=1, max_size=300))
def test_every_metric_name_becomes_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    made = tracking.metric_name(name)
    _validate_metric_name(made)
    assert tracking.metric_name(made) == made


def test_tables_and_pictures_are_replaced_not_piled_up(store: Path, tmp_path: Path) -> None:
    run = opened("mempo", {}, {}, tmp_path / "mlflow.json")
    for count in (1, 2):
        tracking.log_table(run, "rounds", {"round": list(range(count)), "em": [math.nan, 0.5][:count]})
        tracking.log_figure(run, Figure(), "mem_reward_box.png")
    client = mlflow.MlflowClient()
    assert run.run_id
    assert sorted(entry.path for entry in client.list_artifacts(run.run_id)) == ["mem_reward_box.png", "rounds.json"]
    table = json.loads(Path(client.download_artifacts(run.run_id, "rounds.json")).read_text())
    assert table == {"columns": ["round", "em"], "data": [[0, None], [1, 0.5]]}


def views(name: str) -> dict[str, Any]:
    """The states of the experiment's views by their names, as the page decodes them."""
    experiment = mlflow.MlflowClient().get_experiment_by_name(name)
    assert experiment is not None
    stored = {
        tag.rpartition(".")[2]: json.loads(text)["state"] for tag, text in experiment.tags.items() if "View" in tag
    }
    packed = {name: base64.b64decode(state.removeprefix("deflate;")) for name, state in stored.items()}
    return {name: json.loads(zlib.decompress(state)) for name, state in packed.items()}


def test_the_experiment_carries_the_prebuilt_views(store: Path, tmp_path: Path) -> None:
    run = opened("mempo", {}, {}, tmp_path / "mlflow.json", experiment="mine")
    found = views("mine")
    assert set(found) == set(chart_view.VIEWS) == {"mempo", "ablation"}
    assert found["ablation"]["groupBy"]["groupByKeys"][1] == {"mode": "tag", "groupByData": "variant"}
    assert "groupBy" not in found["mempo"]
    url = tracking.charts_url("http://127.0.0.1:5000", "mine", "ablation")
    assert url.startswith(f"http://127.0.0.1:5000/#/experiments/{look(run).info.experiment_id}/runs?")
    assert "compareRunsMode=CHART" in url and "viewStateShareKey=ablation" in url


def test_an_older_experiment_gets_the_views_and_keeps_its_own(store: Path, tmp_path: Path) -> None:
    client = mlflow.MlflowClient()
    number = client.create_experiment("old", tags={"mlflow.sharedViewState.mempo": "mine"})
    opened("mempo", {}, {}, tmp_path / "mlflow.json", experiment="old")
    tags = client.get_experiment(number).tags
    assert tags["mlflow.sharedViewState.mempo"] == "mine" and "mlflow.sharedViewState.ablation" in tags


def scene(attack: str = "") -> Scene:
    asked = question("q", [["Lima", "Ciudad de los Reyes"]])
    said = turn(9, 6, (0, 2), text=f"<mem>m</mem>{attack}", action="answer", observation=None)
    attempt = trajectory([turn(5, 4, observation=attack), said], "q", answer="Lima")
    scores = [turn_score(attempt, 1), turn_score(attempt, 2, [-0.1], [-0.2])]
    _, table = build([attempt], {"q": asked}, scores, Config(), round_index=3)
    return scenes([attempt], {"q": asked}, scores, table, Config().mem_reward)[0]


def test_a_trajectory_is_a_trace_with_a_span_a_turn(store: Path, tmp_path: Path) -> None:
    run = opened("mempo", {}, {}, tmp_path / "mlflow.json")
    traced = traces.trace(scene("\x00 </mem> \u202e"), ["x" * 3000 + "who?", "and then?"], 3)
    for _ in range(2):  # a resumed run logs the round's traces again
        tracking.log_trace(run, traced, HOUR)
    experiment = look(run).info.experiment_id
    (found,) = mlflow.MlflowClient().search_traces(locations=[experiment], run_id=run.run_id)
    assert found.info.tags["round"] == "3" and found.info.tags["chosen"] == "right"
    assert (found.info.request_time, found.info.execution_duration) == (HOUR, 4 + 6)  # a millisecond a token
    whole, first, second = sorted(found.data.spans, key=lambda span: (span.start_time_ns, span.name != "q/0"))
    assert whole.inputs["golden_answers"] == [["Lima", "Ciudad de los Reyes"]] and whole.outputs["answer"] == "Lima"
    assert {first.parent_id, second.parent_id} == {whole.span_id} and whole.parent_id is None
    assert first.inputs["prompt"].endswith("xwho?") and len(first.inputs["prompt"]) == traces.PROMPT_TAIL
    assert first.outputs["observation"] == "\x00 </mem> \u202e" and first.attributes["no_probe"] == "first_turn"
    assert second.name == "turn 2: answer" and second.outputs["memory"] == "m"
    assert second.attributes["mem_reward"] == pytest.approx(math.exp(-0.2) - math.exp(-0.1))
    assert second.attributes["p_mem"] == pytest.approx(math.exp(-0.2)) and second.attributes["mem_advantage"] < 0


def test_two_processes_make_one_store(store: Path, tmp_path: Path) -> None:
    code = """
        import sys; from pathlib import Path; from tasks import tracking
        print(bool(tracking.begin(tracking.open_tracking("mempo", {}, {}, Path(sys.argv[1])))))
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{store}/fresh.db"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / f"{index}.json")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    assert [child.communicate(timeout=240)[0].strip() for child in children] == ["True", "True"]


def test_a_job_left_behind_and_the_end_of_a_run_save_side_by_side(store: Path, tmp_path: Path) -> None:
    """Each write takes the former one's half away: two at once would fail the slower, and with it the training."""
    file = tmp_path / "mlflow.json"
    run = tracking.open_tracking("mempo", {}, {}, file)
    failed: list[BaseException] = []

    def left_behind() -> None:
        try:
            for index in range(200):
                run.log_through(index)
        except OSError as error:
            failed.append(error)

    worker = threading.Thread(target=left_behind)
    worker.start()
    while worker.is_alive():
        run.become("FINISHED")
    assert failed == []
    assert tracking.open_tracking("mempo", {}, {}, file).last_logged == 199
