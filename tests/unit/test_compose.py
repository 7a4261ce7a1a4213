"""Questions that need a memory, splits that share nothing, answers that are spread; all of it from the seed alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mempo import data
from mempo.config import Config, Data
from mempo.data.compose import MAX_SHARE, MIXES, Objective, question_text
from mempo.data.geo import Fact, build_world, heldout_countries
from mempo.records import Question
from mempo.search import Retriever
from mempo.search.bm25 import BM25
from mempo.storage import content_hash, read_json, read_records

Asked = dict[str, list[Question]]
Dataset = tuple[Data, Asked, dict[str, list[data.Truth]]]


@pytest.fixture(scope="module", params=["easy", "hard", "general"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    config = Config(data=Data(mix=request.param, num_train=600))
    folder = tmp_path_factory.mktemp(request.param) / "geo"
    data.prepare(config.data, config.model, folder)
    truths: dict[str, list[data.Truth]] = {}
    for truth in read_records(folder / "truth.parquet", data.Truth):
        truths.setdefault(truth.question_id, []).append(truth)
    return config.data, {name: read_records(folder / f"{name}.parquet", Question) for name in SPLITS}, truths


SPLITS = ("train", "dev", "test")


def test_a_question_reads_as_a_question() -> None:
    lyon = Objective((Fact("Lyon", "country", "France"), Fact("France", "currency", "Euro")), "second")
    oslo = Objective((Fact("Norway", "capital", "Oslo"),), "first")
    expected = "What is first the capital of Norway; second the currency of the country of Lyon?"
    assert question_text([oslo, lyon]) == expected
    assert question_text([oslo]) == "What is the capital of Norway?"


def test_sizes_patterns_and_the_truth(dataset: Dataset) -> None:
    config, asked, truths = dataset
    assert [len(asked[name]) for name in SPLITS] == [600, 128, 512]
    for question in [question for name in SPLITS for question in asked[name]]:
        chains = truths[question.question_id]
        assert [[truth.values[-1]] for truth in chains] == question.golden_answers
        assert all(truth.entities[1:] == truth.values[:-1] for truth in chains)
        pattern = "".join(str(len(truth.values)) for truth in chains)
        if config.mix == "general":
            assert len(pattern) <= config.max_objectives and max(pattern) <= str(config.max_hops)
        else:
            assert pattern in MIXES[config.mix]


def test_the_general_builder_reaches_every_size(dataset: Dataset) -> None:
    config, asked, truths = dataset
    if config.mix == "general":
        chains = [truths[question.question_id] for name in SPLITS for question in asked[name]]
        assert {len(chain) for chain in chains} == {1, 2, 3, 4}
        assert {len(truth.values) for chain in chains for truth in chain} == {1, 2, 3}


def test_splits_share_no_question(dataset: Dataset) -> None:
    _, asked, truths = dataset
    every = [question for name in SPLITS for question in asked[name]]
    assert len({question.question for question in every}) == len(every)
    sets = [frozenset((t.entities[0], *t.relations) for t in truths[question.question_id]) for question in every]
    assert len(set(sets)) == len(every)


def test_heldout_entities_are_for_dev_and_test_alone(dataset: Dataset) -> None:
    config, asked, truths = dataset
    world = build_world(config)
    heldout = heldout_countries(world, config)
    for name in SPLITS:
        for question in asked[name]:
            visited = [entity for truth in truths[question.question_id] for entity in truth.entities]
            assert {world[entity].country in heldout for entity in visited} == {name != "train"}


def test_no_observation_holds_two_answers(dataset: Dataset) -> None:
    """Whatever is searched for, one observation is one document; none holds the answers of two objectives."""
    config, asked, truths = dataset
    documents = [f" {' '.join(words(e.document.text))} " for e in build_world(config).values()]
    holding: dict[str, set[int]] = {}
    for question in [question for name in SPLITS for question in asked[name]]:
        seen: set[int] = set()
        for (answer,) in question.golden_answers:
            if answer not in holding:
                text = f" {' '.join(words(answer))} "
                holding[answer] = {i for i, document in enumerate(documents) if text in document}
            assert holding[answer] and not seen & holding[answer], question
            seen |= holding[answer]
            assert answer.lower() not in question.question.lower()
        used = [doc_id for truth in truths[question.question_id] for doc_id in truth.doc_ids]
        assert len(set(used)) == len(used)


def words(text: str) -> list[str]:
    return "".join(char if char.isalnum() else " " for char in text.lower()).split()


def test_a_search_for_the_name_finds_the_document(dataset: Dataset) -> None:
    config, _, truths = dataset
    documents = [entity.document for entity in build_world(config).values()]
    retriever = Retriever(documents, BM25.build(documents))
    hops = {hop for chain in truths.values() for t in chain for hop in zip(t.entities, t.doc_ids, strict=True)}
    for entity, doc_id in hops:
        assert [hit.document.doc_id for hit in retriever.find([entity], 1)[0]] == [doc_id]


def test_answers_are_spread(dataset: Dataset) -> None:
    _, asked, _ = dataset
    for name in SPLITS:
        control = Counter(a for q in asked[name] if len(q.golden_answers) > 1 for (a,) in q.golden_answers)
        assert max(control.values()) <= MAX_SHARE * control.total(), (name, control.most_common(2))
        assert not {"Europe", "Asia", "Africa", "Euro", "Dollar"} & set(control)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    config = Config(data=Data(num_train=40, num_dev=8, num_test=8))
    for name in ("one", "two"):
        data.prepare(config.data, config.model, tmp_path / name)
    assert content_hash(tmp_path / "one") == content_hash(tmp_path / "two")
    data.prepare(config.data.model_copy(update={"seed": 1}), config.model, tmp_path / "other")
    assert content_hash(tmp_path / "other") != content_hash(tmp_path / "one")


def test_statistics() -> None:
    oslo, bern = (Objective((Fact(f"of {name}", "capital", name),)) for name in ("Oslo", "Bern"))
    stats = data.split_stats([[oslo, bern], [oslo, bern], [bern, oslo], [oslo]])
    assert stats["majority_em"] == {"1": 1.0, "2": pytest.approx(2 / 3)}
    assert stats["frequent_answers"] == {"Oslo": 0.5, "Bern": 0.5}  # 3 of 6 each; the single question is no control
    assert stats["patterns"] == {"1": 1, "11": 3}


def test_a_world_too_small_says_so(tmp_path: Path) -> None:
    config = Config(data=Data(num_countries=12, num_cities=5, num_train=40))
    with pytest.raises(ValueError, match="no more than"):
        data.prepare(config.data, config.model, tmp_path / "geo")
    assert not (tmp_path / "geo").exists()


def test_stats_are_written(tmp_path: Path) -> None:
    config = Config(data=Data(num_train=40, num_dev=8, num_test=8))
    stats = data.prepare(config.data, config.model, tmp_path / "geo")
    assert read_json(tmp_path / "geo" / "stats.json") == stats
    assert stats["num_documents"] == 688 and stats["splits"]["dev"]["num_questions"] == 8
