"""Where questions come from: the parts of section ``data`` for question files, and the curriculum of the rounds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mempo.choices import Layout
from mempo.sections import Count, Section

NumObjectives = Annotated[int, Field(ge=1, le=16)]
Weight = Annotated[float, Field(gt=0)]
SPLITS = ("train", "dev", "test")


def _path_alone(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class QuestionFile(Section):
    """A file of questions: a path, or ``hf://datasets/OWNER/NAME@REVISION/PATH`` on the Hub.

    ``source``: its layout, ``data.source`` where none is named. ``name``: of the dataset, by default the layout's.
    ``weight``: how often an objective is drawn from it, beside the other files of its split.
    """

    path: Annotated[str, Field(min_length=1)]
    source: Layout | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    weight: Weight = 1.0


class Split(Section):
    """``objectives``: how many questions are joined into one -> how often. Questions are built until the files end."""

    files: tuple[Annotated[QuestionFile, BeforeValidator(_path_alone)], ...] = ()
    objectives: Annotated[dict[NumObjectives, Weight], Field(min_length=1)] = Field(default={1: 1.0})
    max_questions: Count | None = None


class Phase(Section):
    """From round ``from_round`` on, the rounds ask questions of so many objectives."""

    from_round: Annotated[int, Field(ge=0)]
    objectives: Annotated[tuple[NumObjectives, ...], Field(min_length=1)]
