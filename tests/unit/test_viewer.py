"""The viewer: which trajectories, what is kept of a probe, and a page that hostile text cannot break."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mempo import report, storage, viewer
from mempo.config import Config, MemReward
from mempo.records import TurnScore
from mempo.samples import TurnReward, build
from tests.unit.builders import question, trajectory, turn, turn_score
from tests.unit.results_tree import HOSTILE, write_tree
from tests.unit.test_report import Page


def row(name: str, turn: int = 2, score: float = 0.0, advantage: float | None = None) -> TurnReward:
    reward = None if advantage is None else advantage / 10
    return TurnReward(name, 0, turn, "answered", True, score, 0.0, None, 0.5, 0.5, 1, 1, 1, reward,
                      advantage or 0.0, 3, 30, 9)  # fmt: skip


def rows(name: str, score: float, *advantages: float | None) -> list[TurnReward]:
    return [row(name, index, score, value) for index, value in enumerate(advantages, start=1)]


def test_the_four_kinds_take_turns():
    table = [
        *rows("short right", 1.0, None),
        *rows("right", 1.0, None, 0.5),
        *rows("wrong", 0.0, None, -0.5),
        *rows("high", 0.0, None, 2.0),
        *rows("low", 1.0, None, -3.0),
        *rows("rest", 0.0, None, 0.0),
    ]
    chosen = {key[0]: why for key, why in viewer.choose(table, 5).items()}
    assert chosen == {
        "right": "right",  # the longest right one, and the first of two
        "wrong": "wrong",
        "high": "largest memory advantage",
        "low": "most negative memory advantage",
        "short right": "right",  # the next one, its question not shown yet
    }
    assert len(viewer.choose(table, 99)) == 6 and viewer.choose([], 8) == {}


def test_a_question_is_shown_again_only_when_all_are():
    again = [replace(first, sample_index=1) for first in rows("a", 1.0, None, None)]
    table = [*rows("a", 1.0, None, None), *again, *rows("b", 1.0, None)]
    assert list(viewer.choose(table, 3)) == [("a", 0), ("b", 0), ("a", 1)]


def test_without_a_memory_reward_right_and_wrong_are_left():
    table = [*rows("a", 1.0, None, None), *rows("b", 0.0, None), *rows("c", 0.0, None, None)]
    assert [why for why in viewer.choose(table, 8).values()] == ["right", "wrong", "wrong"]


def full_and_mem() -> tuple[list[float], list[float]]:
    # p 0.9, 0.6, 0.3 after the history; 0.9, 0.4, 0.3 after the memory
    return [math.log(p) for p in (0.9, 0.6, 0.3)], [math.log(p) for p in (0.9, 0.4, 0.3)]


@pytest.mark.parametrize(
    ("options", "full", "mem"),
    [
        ({"mask": "independent"}, [1, 1, 0], [1, 0, 0]),
        ({"mask": "shared"}, [1, 1, 0], [1, 1, 0]),
        ({"mask": "none"}, [1, 1, 1], [1, 1, 1]),
        ({"mask": "independent", "threshold": 0.0}, [1, 1, 1], [1, 1, 1]),
        ({"mask": "independent", "quantile": 0.5}, [1, 1, 0], [1, 0, 0]),  # of .3 .3 .4 .6 .9 .9: above .5
    ],
)
def test_the_tokens_shown_as_kept_are_those_the_reward_counts(options: dict, full: list[int], mem: list[int]):
    asked = question("q")
    attempt = trajectory([turn(5, 4), turn(9, 6, (0, 2))], "q")
    scores = [turn_score(attempt, 1), turn_score(attempt, 2, *full_and_mem())]
    config = Config(mem_reward=MemReward(**options))
    _, table = build([attempt], {"q": asked}, scores, config, round_index=0)
    (scene,) = viewer.scenes([attempt], {"q": asked}, scores, table, config.mem_reward)
    (tokens,) = scene.turns[1].probes
    assert [int(token.kept_full) for token in tokens] == full and [int(token.kept_mem) for token in tokens] == mem
    assert (table[1].kept_full, table[1].kept_mem) == (sum(full), sum(mem))
    assert [round(token.p_mem, 6) for token in tokens] == [0.9, 0.4, 0.3] and scene.turns[0].probes == []


def test_a_table_from_a_file_has_none_where_pandas_has_nan(tmp_path: Path):
    table = [row("a", 1), row("a", 2, advantage=1.5)]
    pd.DataFrame([{**{f: getattr(r, f) for f in r.__slots__}, "round": 0} for r in table]).to_parquet(tmp_path / "t")
    assert viewer.turn_rewards(pd.read_parquet(tmp_path / "t")) == table


def test_what_steers_a_terminal_or_a_line_is_spelled_out():
    assert viewer.visible("a\u202eb\x00\x1b[1m\u2028\u2066") == "a‹U+202E›b‹U+0000›‹U+001B›[1m‹U+2028›‹U+2066›"
    assert viewer.visible("línea\n\t汉字 👩‍🔬 שלום") == "línea\n\t汉字 👩‍🔬 שלום"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("viewer"), num_rounds=3)
    report.build(root)
    return root


def html(root: Path) -> str:
    return (root / "report" / "trajectories.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_else_and_is_linked(root: Path):
    page = Page(html(root))
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", html(root))
    assert 'href="trajectories.html"' in (root / "report" / "index.html").read_text()
    assert page.tags.count("h2") == 3 and page.tags.count("h3") == 6  # first and last round of each policy
    assert html(root).count('<details class="trajectory"') == 6 * viewer.SHOWN
    assert html(root).count('<details class="trajectory" open') == 3


def test_each_memory_is_shaded_by_its_advantage_and_says_it(root: Path):
    assert 'class="worth  up" style="--size: 1.000">+0.10<' in html(root).replace("chip ", "")
    assert Page(html(root)).text["mark"][0].startswith("<mem>Peru&#39;s".replace("&#39;", "'"))
    assert html(root).count("not_asked") > 0  # grpo and full_context have no probe, and say why


ATTACKS = [
    HOSTILE,
    "</mem></div></details><script>alert(1)</script>",
    "\"' onmouseover=alert(1) x='",
    "\u202egnp.exe\u202c",
    "x" * 20_000,
    "<!-- ]]> {{ 7 * 7 }} {% raw %} &amp; &lt;",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_text_is_text_wherever_it_stands(tmp_path: Path, attack: str):
    write_tree(tmp_path, ("mempo",), num_rounds=1)
    folder = tmp_path / "results" / "mempo" / "trajectories"
    asked = question(attack, [[attack.replace(";", ","), attack + "2"]])
    said = turn(9, 6, (0, 2), text=f"<mem>{attack}</mem>{attack}", observation=attack)
    attempt = trajectory([turn(5, 4, text=attack), said], attack, answer=attack)
    first, second = turn_score(attempt, 1), turn_score(attempt, 2, *full_and_mem())
    size = len(attack)
    places = {"text": attack, "starts": [0, 0, 0], "ends": [size] * 3, "gold_spans": [(0, size)]}
    values = {f: getattr(second.probes[0], f) for f in second.probes[0].__slots__} | places
    probe = type(second.probes[0])(**values)
    scores = [first, TurnScore(**({f: getattr(second, f) for f in second.__slots__} | {"probes": [probe]}))]
    _, table = build([attempt], {attack: asked}, scores, Config(), round_index=0)
    for kind, records in {"rollouts": [attempt], "questions": [asked], "scores": scores}.items():
        storage.write_records(folder / f"{kind}_0000.parquet", records)
    frame = pd.DataFrame([{f: getattr(r, f) for f in r.__slots__} for r in table]).assign(round=0)
    frame.to_parquet(tmp_path / "results" / "mempo" / "rewards.parquet")
    report.build(tmp_path)
    page = Page(html(tmp_path))  # asserts that all tags close as ours do
    assert "script" not in page.tags and "onmouseover" not in "".join(page.tags)
    assert "\u202e" not in html(tmp_path) and "49" not in "".join(page.text.get("mark", []))
    everything = "".join("".join(texts) for texts in page.text.values())
    assert viewer.visible(attack) in everything
