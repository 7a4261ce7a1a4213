"""The report: one page that needs nothing else, true figures beside it, and clear words where an input is missing."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from mempo import report, storage
from mempo.diagnoses.captions import CAPTIONS
from mempo.excerpts import choose, pieces
from mempo.results import controlled, differences, train_figures
from tests.unit.builders import question, trajectory, turn
from tests.unit.results_tree import HOSTILE, write_tree


class Page(HTMLParser):
    """Tags, image sources, and the text of each tag name."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[str] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag  # well-formed: nothing from the data closed a tag of ours

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("report"), num_rounds=8)
    assert report.build(root) == root / "report" / "index.html"
    return root


@pytest.fixture(scope="module")
def page(root: Path) -> Page:
    return Page((root / "report" / "index.html").read_text(encoding="utf-8"))


def test_the_page_is_self_contained(root: Path, page: Page):
    html = (root / "report" / "index.html").read_text(encoding="utf-8")
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.images and all(source.startswith("data:image/png;base64,") for source in page.images)
    assert not re.search(r"https?://|url\(|@import", html)
    assert len(page.images) == len(list((root / "report").glob("*.png"))) == 10


def test_text_from_the_model_and_the_search_is_text(page: Page):
    said, seen = "".join(page.text["div"]), "".join(page.text["b"])
    assert HOSTILE in said and "What is the <b>capital</b>" in seen
    marked = page.text["mark"]
    assert any(text.startswith("<mem>Peru's capital is Lima") and text.endswith("</mem>") for text in marked)


def test_the_table_tells_each_policy_and_the_majority_guesser(root: Path, page: Page):
    cells = [text.strip() for text in page.text["td"]]
    metrics = storage.read_json(root / "metrics" / "evaluation.json")
    for name in ("warmstart", "mempo", "grpo", "full_context"):
        assert f"{metrics[name]['em_greedy']:.3f}" in cells[cells.index(name) :]
    assert "0.021" in cells  # 100 questions each of .05, .01, .002
    words = " ".join(" ".join(page.text["p"]).split())
    assert "300 questions" in words and "differences inside the noise are no result" in words
    assert "Trained without memory reward: grpo, full_context." in words


def test_controlled_memories_of_the_policies_that_have_some(page: Page):
    words = " ".join(" ".join(page.text["p"] + page.text["b"] + page.text["td"]).split())
    assert "mempo, round 0" in words and "grpo, round 0" in words and "full_context, round" not in words
    cells = [text.strip() for text in page.text["td"]]
    of_mempo = cells[cells.index("complete") :]
    assert of_mempo[:6] == ["complete", "100", "0.800", "+0.200", "0.90", "0.800"]
    assert "one item wrong" not in cells, "a kind that no turn had"
    assert "empty <mem></mem>" in cells
    assert ["0", "0.200", "0.300", "−0.250"] in [
        cells[i + 1 : i + 5] for i, text in enumerate(cells) if text == "mempo"
    ]


def test_first_and_last_round_with_controls():
    frame = pd.DataFrame(
        {"round": [0, 1, 2, 3], "control/own/n": [5, None, 7, 0], "control/own/p_mem": [0.5, None, 0.25, None]}
    )
    assert controlled(frame) == {0: {"own/n": 5, "own/p_mem": 0.5}, 2: {"own/n": 7, "own/p_mem": 0.25}}
    assert controlled(frame[["round"]]) == {}


def test_train_json(root: Path):
    trained = storage.read_json(root / "metrics" / "train.json")
    assert list(trained) == ["full_context", "grpo", "mempo"]
    mempo = trained["mempo"]
    assert (mempo["rounds"], mempo["trajectories"]) == (8, 8 * 32)
    assert mempo["orchestration_share"] == pytest.approx(1 - 4.6 / 5.0)
    assert mempo["cpu_seconds"] == pytest.approx(8 * 0.9 * (2.2 + 0.6 + 0.1 + 1.7))
    assert mempo["seconds"]["check"] == 1.5  # once, after round 7
    assert "mem_reward_p50_last" in mempo and "mem_reward_p50_last" not in trained["grpo"]


def test_train_figures_by_hand():
    frame = pd.DataFrame(
        {
            "round": [0, 1, 2], "trajectories": [4, 4, 4], "em": [0.25, 0.75, 0.5], "time/rollout_s": [1.0, 2.0, 3.0],
            "cpu/rollout_s": [1.0, 1.0, 1.0], "wall_s": [None, 4.0, 6.0], "work_s": [None, 3.0, 6.0],
            "response_tokens": [10, 20, 30], "prompt_tokens": [100, 200, 300],
            "time/score_s": [1.0, 1.0, 1.0], "time/update_s": [2.0, 2.0, 1.0],
        }
    )  # fmt: skip
    found = train_figures(frame)
    assert (found["em_last"], found["em_best"], found["em_best_round"]) == (0.5, 0.75, 1)
    assert found["seconds"] == {"rollout": 6.0, "score": 3.0, "update": 5.0} and found["cpu_seconds"] == 3.0
    # 60 tokens generated in 6 s; 660 of all turns in 3 s and in 5 s
    assert found["tokens_per_second"] == {"rollout": 10.0, "score": 220.0, "update": 132.0}
    assert found["orchestration_share"] == pytest.approx(0.1)  # 1 - 9 / 10; the cut round is left out
    assert "orchestration_share" not in train_figures(frame.drop(columns=["wall_s", "work_s"]))
    assert json.dumps(found, allow_nan=False)


def test_plots(root: Path):
    with (root / "plots" / "mempo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == [str(i) for i in range(8)]
    assert {"em", "mem_reward/p05", "mem_reward/p50", "mem_reward/p95", "approx_kl", "cpu_seconds"} <= set(rows[0])
    assert "em" in (root / "plots" / "grpo.csv").read_text().splitlines()[0]


def test_built_twice_is_the_same_bytes_and_nothing_stale_stays(root: Path):
    before = storage.content_hash(root / "report")
    (root / "report" / "stale.png").write_bytes(b"x")
    report.build(root)
    assert storage.content_hash(root / "report") == before


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("results/evaluation.parquet", "mempo evaluate"),
        ("results/majority.json", "mempo evaluate"),
        ("metrics/evaluation.json", "mempo evaluate"),
        ("results/grpo/rounds.parquet", "mempo train grpo"),
        ("results/mempo/rewards.parquet", "mempo train mempo"),
        ("results/mempo/trajectories/rollouts_0000.parquet", "mempo train mempo"),
        ("results/mempo/trajectories/questions_0000.parquet", "mempo train mempo"),
        ("results/mempo/trajectories/scores_0000.parquet", "mempo train mempo"),
        ("results/grpo/config.json", "mempo train grpo"),
        ("results/mempo/diagnoses.json", "mempo train mempo"),
    ],
)
def test_a_missing_input_is_named_with_what_makes_it(tmp_path: Path, missing: str, command: str):
    write_tree(tmp_path, ("mempo", "grpo"), num_rounds=1)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"{missing}.*`{command}`"):
        report.build(tmp_path)
    assert not (tmp_path / "report").exists()


def test_no_policy_with_a_memory_reward(tmp_path: Path):
    html = report.build(write_tree(tmp_path, ("grpo",), num_rounds=1)).read_text(encoding="utf-8")
    assert "Trained without memory reward: grpo." in html and "mem_reward</th>" not in html
    assert html.count('<section class="trajectory">') == 3


def test_differences_are_paired():
    rows = pd.DataFrame(
        [
            (policy, False, q, em)
            for policy, ems in {"mempo": [1.0, 1.0, 0.0, 1.0], "warmstart": [1.0, 0.0, 0.0, 0.0]}.items()
            for q, em in zip("abcd", ems, strict=True)
        ]
        + [("mempo", True, "a", 0.0)],
        columns=["policy", "greedy", "question_id", "em"],
    )
    (gap,) = differences(rows)
    # gaps 0, 1, 0, 1: mean 1/2, standard deviation 1/2, over sqrt(4)
    assert (gap.first, gap.second, gap.mean, gap.error, gap.is_noise) == ("mempo", "warmstart", 0.5, 0.25, False)


def test_trajectories_are_chosen_by_the_rule():
    lengths = {
        "long wrong": (3, 0.0),
        "short right": (1, 1.0),
        "right": (2, 1.0),
        "longest": (4, 0.0),
        "failed": (9, 0.0),
    }
    found = [trajectory([turn(3, 2)] * length, name) for name, (length, _) in lengths.items()]
    rewards = pd.DataFrame(
        [
            {"question_id": name, "sample_index": 0, "turn": i + 1, "score": score, "mem_reward": None, "p_mem": 0.5,
             "p_full": None}
            for name, (length, score) in lengths.items() if name != "failed" for i in range(length)
        ]
    )  # fmt: skip
    chosen = choose(found, {name: question(name) for name in lengths}, rewards)
    assert [(e.question.question_id, e.score) for e in chosen] == [
        ("right", 1.0),
        ("longest", 0.0),
        ("long wrong", 0.0),
    ]
    assert [(view.mem_reward, view.p_mem) for view in chosen[0].turns] == [(None, 0.5)] * 2


@pytest.mark.parametrize("text", ["", "a<mem>b</mem>c", "<mem>cut", "<mem>a</mem><mem>b</mem>", "<think><mem>no</mem>"])
def test_pieces_join_to_the_text(text: str):
    assert "".join(piece.text for piece in pieces(text, 2)) == text
    assert sum(piece.memory for piece in pieces(text, 2)) == text.startswith(("a<mem>b", "<mem>a"))


def test_the_terminal_table(root: Path):
    console = Console(width=80)
    metrics = storage.read_json(root / "metrics" / "evaluation.json")
    with console.capture() as captured:
        console.print(report.table(metrics))
    lines = captured.get().splitlines()
    assert lines[0].strip() == "300 held-out questions"
    policies = [line.split()[0] for line in lines if "±" in line]
    assert policies == ["warmstart", "mempo", "grpo", "full_context"]
    em = metrics["mempo"]["em"]
    assert f"{em:.3f}±{(em * (1 - em) / 300) ** 0.5:.3f}" in captured.get()


def test_the_diagnoses_of_every_policy_that_writes_memories(root: Path, page: Page):
    headings = page.text["h3"]
    assert "mempo, last round" in headings and "grpo, last round" in headings
    html = (root / "report" / "index.html").read_text(encoding="utf-8")
    section = html[html.index("<h2>4.") : html.index("<h2>5.")]
    mempo, grpo = section.split("<h3>grpo")
    shown = [name for name, caption in CAPTIONS.items() if caption.title in mempo]
    assert shown == [name for name in CAPTIONS if name != "truth"]  # nothing knows the facts here
    assert "Strategies" in grpo and "Variance of the probabilities" not in grpo  # trained without memory reward
    assert "<td>right below</td>" in mempo and "<td>none</td>" in mempo and "−0.000<" not in section


def test_a_label_from_a_file_is_text(tmp_path: Path):
    write_tree(tmp_path, ("mempo",), num_rounds=1)
    file = tmp_path / "results" / "mempo" / "diagnoses.json"
    hostile = {"columns": [HOSTILE], "rows": [[HOSTILE], [None], [3], [-0.00001]]}
    storage.write_json(file, {"rounds": 2, "tables": {"bias": hostile, "<i>": hostile}})
    page = Page(report.build(tmp_path).read_text(encoding="utf-8"))
    shown = HOSTILE.replace("_", " ")
    assert "script" not in page.tags and shown in page.text["th"] and shown in page.text["td"]
    assert {"–", "3", "0.000"} <= set(page.text["td"])
