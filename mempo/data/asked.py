"""The questions of a suite: a split of the experiment's own data, or a dataset folder with a test split alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from mempo.config import Config, Data, digest
from mempo.data import corpus_row, files, majority_em, question_record, tokenizer_texts, truths, usable_names
from mempo.data.compose import Composer, Objective, compose
from mempo.data.geo import World, build_world, heldout_countries
from mempo.data.questions import NOTHING_TO_SEARCH, write_questions
from mempo.records import Question
from mempo.scratch import train_bpe
from mempo.sources import Split
from mempo.storage import content_hash, read_json, read_records, whole_folder, write_json, write_records
from mempo.suite import Asked


def prepare_asked(asked: Asked, config: Config, own: Path, home: Path) -> tuple[Path, list[Question]]:
    """The folder that is searched, and the questions. What is made for the suite lies below ``home`` by its key.

    ``own``: the experiment's dataset folder. Raises ``ValueError`` where there are fewer than ``max_questions``.
    """
    folder, split = (own, asked.split) if asked.split else (_made(asked, config, own, home), "test")
    questions = read_records(folder / f"{split}.parquet", Question)
    if len(questions) < (asked.max_questions or 1):
        raise ValueError(f"max_questions: {asked.max_questions}, and there are {len(questions)}")
    return folder, questions[: asked.max_questions]


def majority(folder: Path, asked: Asked) -> Mapping[str, float]:
    """The exact match of always giving the most frequent answers of the split, by number of objectives as text."""
    found: Mapping[str, float] = read_json(folder / "stats.json")["splits"][asked.split or "test"]["majority_em"]
    return found


def _made(asked: Asked, config: Config, own: Path, home: Path) -> Path:
    if asked.source == "geo":
        inputs: Any = [config.data.model_dump(mode="json"), _bpe(own, config, build_world(config.data)).to_str()]
    else:
        paths = [file.path for file in asked.files] + ([asked.corpus] if asked.corpus else [])
        inputs = [content_hash(files.local_file(path)) for path in paths] + [config.data.seed]
    folder = home / f"questions-{digest([asked.model_dump(mode='json'), inputs])}"
    if not folder.exists():
        with whole_folder(folder) as temporary:
            if asked.source == "geo":
                _write_geo(asked, config, own, temporary)
            else:
                _, stats = write_questions(_narrowed(asked, config.data), temporary)
                if not (stats["num_documents"] or config.search.urls):
                    raise ValueError(NOTHING_TO_SEARCH.format("corpus"))
    return folder


def _narrowed(asked: Asked, data: Data) -> Data:
    split = Split(files=asked.files, objectives=asked.objectives, max_questions=asked.max_questions)
    return data.model_copy(
        update={"source": asked.source, "corpus": asked.corpus, "train": Split(), "dev": Split(), "test": split}
    )


def _write_geo(asked: Asked, config: Config, own: Path, folder: Path) -> None:
    data, world = config.data, build_world(config.data)
    assert asked.max_questions is not None, "see Asked"
    sizes = shares(asked.max_questions, asked.objectives)
    usable = usable_names(world, _bpe(own, config, world), data.max_name_tokens)
    questions = heldout_questions(world, data, usable.__contains__, sizes, asked.hops)
    (folder / "corpus.jsonl").write_text("".join(map(corpus_row, world.values())), encoding="utf-8")
    write_records(folder / "test.parquet", [question_record(f"test-{i:05d}", o) for i, o in enumerate(questions)])
    write_records(folder / "truth.parquet", truths(world, {"test": questions}))
    guessed = majority_em(tuple(o.answer for o in objectives) for objectives in questions)
    write_json(folder / "stats.json", {"splits": {"test": {"majority_em": guessed}}})


def heldout_questions(
    world: World, data: Data, usable: Callable[[str], bool], sizes: Mapping[int, int], max_hops: int
) -> list[list[Objective]]:
    """``sizes``: number of objectives -> of questions about held-out entities, an objective of 1 to ``max_hops`` hops.

    Raises ``ValueError`` where the world cannot give as many.
    """
    composer, taken = Composer(world, data, heldout_countries(world, data), usable), set[frozenset[str]]()
    questions = []
    for number, size in sizes.items():

        def pattern(random: Random, number: int = number) -> str:
            return "".join(str(random.randint(1, max_hops)) for _ in range(number))

        questions += compose(composer, pattern, size, number, Random(f"{data.seed}/{number}"), taken)
    return questions


def _bpe(own: Path, config: Config, world: World) -> Tokenizer:
    """Which names can be asked for depends on it: that of the experiment's own data, else what ``geo`` would have."""
    if (file := own / "tokenizer.json").exists():
        return Tokenizer.from_file(str(file))
    return train_bpe(tokenizer_texts(world, []), config.model.vocab_size)


def shares(total: int, weights: Mapping[int, float]) -> dict[int, int]:
    """``total`` divided by ``weights``, what rounding leaves given to the first.

    >>> shares(10, {1: 1, 2: 1, 4: 1})
    {1: 4, 2: 3, 4: 3}
    """
    whole = sum(weights.values())
    found = {number: int(total * weight / whole) for number, weight in weights.items()}
    for number in list(found)[: total - sum(found.values())]:
        found[number] += 1
    return found
