"""``mempo ask``: a real policy answers, and what it and its tool say is shown as text."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from mempo.asking import ask, render
from mempo.config import Config
from tests.unit.builders import trajectory, turn


def shown(made: object) -> str:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    console.print(made)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_policy_is_asked(tiny_policy: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "contents": "Ulm\nUlm lies on the Danube."}) + "\n")
    config = Config.model_validate({"rollout": {"max_response_tokens": 16}})
    made = ask("Where is Ulm?", tiny_policy, corpus, config, seed=0, greedy=True)
    assert made == ask("Where is Ulm?", tiny_policy, corpus, config, seed=1, greedy=True)
    assert len(made.turns[0].response_ids) <= 16
    assert f"{made.status}: " in shown(render(made)) and "turn 1" in shown(render(made))


def test_neither_markup_nor_control_characters_reach_the_terminal() -> None:
    """``ESC ]0;`` names the window, ``ESC [2J`` and U+009B 2J empty it, a carriage return overwrites the line."""
    hostile = "[bold]x[/bold]\x1b]0;owned\x07\x1b[2J\x9b2Jy\rz\x00\x08\n\tend"
    made = trajectory([turn(3, 2, text=hostile, observation=hostile)], answer=hostile)
    page = shown(render(made))
    assert page.count("[bold]x[/bold]") == 3 and page.count("end") == 3
    assert not set(page) & {chr(code) for code in (*range(10), *range(11, 32), *range(127, 160))}
