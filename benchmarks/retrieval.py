"""BM25 over many passages: how long the index takes, how much memory, how many queries a second it answers.

    python benchmarks/retrieval.py FOLDER [--passages 1000000]

Passages of 100 words from a Zipf vocabulary of half a million words, seeded, as long as those of wiki-18. Queries are
6 words of a passage. Seconds are CPU-seconds of one thread. FOLDER keeps the corpus and the index.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mempo.search.index import build, open_index

NUM_WORDS, VOCABULARY, EXPONENT, CHUNK = 100, 500_000, 1.05, 10_000
QUERIES, QUERY_WORDS = 500, 6


def write_corpus(path: Path, passages: int) -> None:
    rng = np.random.default_rng(0)
    shares = np.arange(1, VOCABULARY + 1) ** -EXPONENT
    cumulative = np.cumsum(shares / shares.sum())
    with path.open("w") as file:
        for first in range(0, passages, CHUNK):
            draws = np.searchsorted(cumulative, rng.random((min(CHUNK, passages - first), NUM_WORDS)))
            for place, row in enumerate(np.minimum(draws, VOCABULARY - 1).tolist(), first):
                text = " ".join(f"w{word}" for word in row)
                file.write(json.dumps({"id": str(place), "contents": f'"Passage {place}"\n{text}'}) + "\n")


def measure_build(corpus: Path, folder: Path) -> None:
    started = time.process_time()
    build(corpus, folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"build: {time.process_time() - started:.0f} s, {peak()}, {size / 2**30:.2f} GiB on the disk", flush=True)


def measure_queries(corpus: Path, folder: Path, passages: int) -> None:
    started = time.process_time()
    retriever = open_index(folder, corpus)
    print(f"open, with the hash of the corpus: {time.process_time() - started:.1f} s, {len(retriever):,} passages")
    rng = np.random.default_rng(1)
    with corpus.open() as file:
        taken = set(rng.choice(passages, QUERIES, replace=False).tolist())
        texts = [json.loads(line)["contents"].split() for place, line in enumerate(file) if place in taken]
    queries = [" ".join(rng.choice(text[2:], QUERY_WORDS, replace=False)) for text in texts]
    retriever.find(queries[:10], 3)
    seconds = []
    for query in queries:
        began = time.process_time()
        retriever.find([query], 3)
        seconds.append(time.process_time() - began)
    p50, p95 = np.percentile(seconds, [50, 95]) * 1000
    print(f"{QUERIES / sum(seconds):.1f} queries/s, top 3; p50 {p50:.1f} ms, p95 {p95:.1f} ms, {peak()}")


def peak() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at the peak"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--part", choices=["build", "query"], help=argparse.SUPPRESS)  # a process of its own each
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    corpus, folder = given.folder / "corpus.jsonl", given.folder / "index"
    if given.part == "build":
        measure_build(corpus, folder)
    elif given.part == "query":
        measure_queries(corpus, folder, given.passages)
    else:
        write_corpus(corpus, given.passages)
        for part in ("build", "query"):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], check=True)


if __name__ == "__main__":
    main()
