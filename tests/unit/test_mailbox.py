"""Commands and replies through a folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mempo.trainers.mailbox import Mailbox
from tests.contract.test_trainers import make_sample


def nothing() -> None:
    return None


def test_a_command_and_its_answer(tmp_path: Path) -> None:
    box, samples = Mailbox(tmp_path), [make_sample("a", 3, 4), make_sample("b", 2, 2)]
    box.ask(1, "alignment", {"second": samples, "first": samples[:1]}, folder="x", version=2)
    assert box.read(1) == ("alignment", [samples, samples[:1]], {"folder": "x", "version": 2})
    box.answer(1, {"loss": 0.1 + 0.2, "ratio_max": math.inf, "nll": math.nan})
    found = box.reply(1, nothing)
    assert found.pop("nll") != 0 and found == {"loss": 0.1 + 0.2, "ratio_max": math.inf}
    assert list(tmp_path.iterdir()) == []


def test_errors_are_raised_where_the_question_was_asked(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    for asked, raised in ((ValueError("a"), ValueError), (FileNotFoundError("b"), OSError)):
        box.refuse(1, asked)
        with pytest.raises(raised, match=str(asked)) as caught:
            box.reply(1, nothing)
        assert type(caught.value) is raised


def test_no_one_waits_for_the_dead(tmp_path: Path) -> None:
    def dead() -> None:
        raise RuntimeError("its ranks ended")

    with pytest.raises(RuntimeError, match="its ranks ended"):
        Mailbox(tmp_path).reply(3, dead)


def test_the_last_answer_of_the_dead_counts(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)

    def dies_after_its_answer() -> None:
        box.answer(1, {"loss": 2.0})
        raise RuntimeError("its ranks ended")

    assert box.reply(1, dies_after_its_answer) == {"loss": 2.0}
