"""True memory quality, by hand: what a memory should hold by now, and what of it it holds."""

from __future__ import annotations

import pytest

from mempo.quality import memory_quality

LYON = [("Lyon", "France"), ("France", "Euro")]
NORWAY = [("Norway", "Oslo")]
SEEN_LYON, SEEN_FRANCE, SEEN_NORWAY = (
    "Lyon: country France.",
    "France: capital Paris, currency Euro.",
    "Norway: capital Oslo.",
)


@pytest.mark.parametrize(
    ("memory", "observations", "quality"),
    [
        ("", [], None),  # nothing is known: nothing can be forgotten
        ("anything", [], None),
        ("country France", [SEEN_LYON], 1.0),
        ("", [SEEN_LYON], 0.0),
        (
            "currency Euro",
            [SEEN_LYON, SEEN_FRANCE],
            1.0,
        ),  # the answer is known: the country on the way is needed no more
        ("country France", [SEEN_LYON, SEEN_FRANCE], 0.0),
        ("currency Euro", [SEEN_FRANCE], None),  # seen before it was asked for: the first hop is not known
        ("country France", [SEEN_LYON, SEEN_NORWAY], 0.5),
        ("country France; capital Oslo", [SEEN_LYON, SEEN_NORWAY], 1.0),
        ("country Francesca", [SEEN_LYON], 0.0),  # whole words
    ],
)
def test_quality(memory: str, observations: list[str], quality: float | None):
    assert memory_quality(memory, [LYON, NORWAY], observations) == quality


def test_names_with_marks_are_plain_text():
    assert (
        memory_quality("capital St. John's (old)", [[("X", "St. John's (old)")]], ["X: capital St. John's (old)."])
        == 1.0
    )
