"""Section ``suites``: what ``mempo evaluate --suite NAME`` asks whom: every agent the questions of every dataset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mempo.choices import Layout
from mempo.sections import Section, checked_name
from mempo.sources import Split

MAX_GEO_OBJECTIVES = 10


def _name(name: str) -> str:
    return checked_name(name, "suites")


SuiteName = Annotated[str, AfterValidator(_name)]  # of a suite, a dataset, an agent


class Asked(Split):
    """A dataset of a suite: a split of the experiment's own data, or questions that are made for the suite alone.

    ``split``: the first ``max_questions`` of it. ``source`` ``geo``: ``max_questions`` about held-out entities, divided
    among numbers of ``objectives`` by their weights, of ``hops`` hops at most. Else the layout of ``files``; ``corpus``
    is searched in the place of their pooled paragraphs.
    """

    split: Literal["train", "dev", "test"] | None = None
    source: Literal["geo", Layout] | None = None
    hops: Annotated[int, Field(ge=1, le=2)] = 2
    corpus: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Asked:
        # By value: a configuration that was written down whole names every key.
        given = {name for name in type(self).model_fields if getattr(self, name) != _default(type(self), name)}
        if self.split is not None:
            _refuse(given, {"source", "files", "objectives", "hops", "corpus"}, f"split: {self.split}")
        elif self.source == "geo":
            _refuse(given, {"files", "corpus"}, "source: geo")
            if self.max_questions is None or max(self.objectives) > MAX_GEO_OBJECTIVES:
                raise ValueError(f"source: geo needs max_questions, and objectives up to {MAX_GEO_OBJECTIVES}")
        elif self.source is None or not self.files:
            raise ValueError(
                "name a split of the experiment's own data, source: geo, or a layout as source and its files"
            )
        else:
            _refuse(given, {"hops"}, f"source: {self.source}")
        return self


def _default(section: type[Section], name: str) -> Any:
    return section.model_fields[name].get_default(call_default_factory=True)


def _refuse(given: set[str], useless: set[str], where: str) -> None:
    if found := sorted(given & useless):
        raise ValueError(f"{found[0]}: does nothing under {where}")


class Suite(Section):
    """``agents``: a name -> ``policy`` and differences from its settings; ``settings``: what all agents differ in.

    ``policy``: one of ``policies``, ``warmstart``, ``pretrained``, a Hugging Face folder or a hub's id. ``samples``
    attempts a question at ``temperature``, and one ``greedy``. The first agent is the one others are compared with.
    """

    datasets: Annotated[dict[SuiteName, Asked], Field(min_length=1)]
    agents: Annotated[dict[SuiteName, dict[str, Any]], Field(min_length=1)]
    settings: dict[str, Any] = Field(default_factory=dict)
    samples: Annotated[int, Field(ge=0, le=64)] = 1
    greedy: bool = True
    temperature: Annotated[float, Field(gt=0)] = 1.0
    seed: int = 0

    @model_validator(mode="after")
    def _somebody_answers(self) -> Suite:
        if self.samples == 0 and not self.greedy:
            raise ValueError("samples: 0 and greedy: false leave nothing to ask")
        for name, agent in self.agents.items():
            if not isinstance(agent.get("policy"), str):
                raise ValueError(f"agents.{name}.policy: expected the name of a policy, a folder, or the id of a hub")
        return self
