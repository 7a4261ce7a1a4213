"""Ask a policy one question and watch it search, its memory turn by turn."""

from __future__ import annotations

import asyncio
import unicodedata
from pathlib import Path

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from mempo.config import Config
from mempo.engines import open_engine
from mempo.records import Question, Trajectory, Turn
from mempo.rollout import collect
from mempo.search import open_searcher

STYLES = {"mem": "bold yellow", "think": "dim", "search": "cyan", "answer": "bold green"}


def ask(question: str, policy: Path, corpus: Path, config: Config, *, seed: int, greedy: bool) -> Trajectory:
    """One trajectory for ``question``; the policy searches ``corpus``."""
    engine = open_engine(policy, config.runtime)
    asked = Question("ask", question, [["unknown"]], "ask")
    searcher = open_searcher(corpus, config.search)
    found = asyncio.run(collect(engine, searcher, [asked], config, round_index=0, seed=seed, greedy=greedy, samples=1))
    engine.close()
    return found[0]


def render(trajectory: Trajectory) -> Group:
    """Panels for a terminal; model and tool text is printed as plain text, never as markup."""
    panels = [_panel(index + 1, turn) for index, turn in enumerate(trajectory.turns)]
    ending = Text(f"{trajectory.status}: {plain(trajectory.answer or 'no answer')}", style="bold")
    return Group(*panels, ending)


def plain(text: str) -> str:
    """``text`` for a terminal, which obeys control and direction characters: a mark stands for each."""
    return "".join(
        char if char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Zl", "Zp") else "\ufffd"
        for char in text
    )


def _panel(index: int, turn: Turn) -> Panel:
    text = Text(plain(turn.text))
    for tag, style in STYLES.items():
        text.highlight_regex(rf"(?s)<{tag}>.*?</{tag}>", style)
    if turn.observation:
        text.append("\n" + plain(turn.observation), style="blue")
    tokens = f"{len(turn.prompt_ids)} tokens read, {len(turn.response_ids)} written"
    return Panel(text, title=f"turn {index}", subtitle=tokens, title_align="left", subtitle_align="right")
