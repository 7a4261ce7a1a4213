"""Whole or not at all, and what goes in comes out to the bit."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from mempo import storage
from mempo.arrow import schema_of
from mempo.records import ProbeScore, Question, Sample, Trajectory, Turn, TurnScore

TEXT = st.text(max_size=12)
INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)


def rows(entry: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(entry, min_size=length, max_size=length)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    alias = st.text(min_size=1, max_size=8).filter(lambda text: text.strip() and not set(text) & set(";；"))
    golden = draw(st.lists(st.lists(alias, min_size=1, max_size=3), min_size=1, max_size=3))
    return Question(draw(TEXT), draw(TEXT), golden, draw(TEXT))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    length = draw(st.integers(0, 4))
    start = draw(st.integers(0, max(0, length - 1)))
    spans = st.none() | st.just((start, length)) if length else st.none()
    return Turn(
        prompt_ids=draw(st.lists(INT, max_size=4)),
        response_ids=draw(rows(INT, length)),
        sampling_logprobs=draw(rows(FLOAT, length)),
        text=draw(TEXT),
        valid=draw(st.booleans()),
        memory=draw(st.none() | TEXT),
        mem_span=draw(spans),
        action=draw(st.sampled_from(["search", "answer", None])),
        argument=draw(st.none() | TEXT),
        observation=draw(st.none() | TEXT),
        observation_ids=draw(st.lists(INT, max_size=4)),
        finish_reason=draw(st.sampled_from(["stop", "length", "eos"])),
    )


trajectories = st.builds(
    Trajectory,
    TEXT,
    INT,
    INT,
    st.lists(turns(), max_size=3),
    st.none() | TEXT,
    st.sampled_from(["answered", "max_turns"]),
)


@st.composite
def probe_scores(draw: st.DrawFn) -> ProbeScore:
    length = draw(st.integers(0, 4))
    return ProbeScore(
        text=draw(TEXT),
        gold_spans=draw(st.lists(st.tuples(INT, INT), max_size=3)),
        token_ids=draw(rows(INT, length)),
        starts=draw(rows(INT, length)),
        ends=draw(rows(INT, length)),
        core_tokens=draw(INT),
        full_logprobs=draw(rows(FLOAT, length)),
        mem_logprobs=draw(rows(FLOAT, length)),
        ahead_logprobs=draw(st.lists(rows(FLOAT, length), max_size=2)),
        actor_logprobs=draw(rows(FLOAT, length)),
    )


@st.composite
def turn_scores(draw: st.DrawFn) -> TurnScore:
    reason = draw(st.sampled_from([None, "first_turn", "overflow"]))
    return TurnScore(
        *(draw(TEXT), draw(INT), draw(INT), draw(INT)),
        probes=[] if reason else draw(st.lists(probe_scores(), min_size=1, max_size=2)),
        mem_tokens=draw(INT),
        context_tokens=draw(INT),
        scorer=draw(TEXT),
        reason=reason,
        old_logprobs=draw(st.lists(FLOAT, max_size=3)),
        ref_logprobs=draw(st.lists(FLOAT, max_size=3)),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 4))
    floats = rows(FLOAT, length)
    mask = rows(st.integers(0, 1), length)
    lists = (draw(rows(INT, length)), draw(mask), draw(floats), draw(floats), draw(FLOAT), draw(floats))
    return Sample(draw(TEXT), *lists, draw(FLOAT), draw(floats))


@pytest.mark.parametrize(
    ("cls", "strategy"),
    [(Question, questions()), (Trajectory, trajectories), (TurnScore, turn_scores()), (Sample, samples())],
)
def test_records_round_trip(tmp_path_factory: pytest.TempPathFactory, cls: type, strategy: Any) -> None:
    path = tmp_path_factory.mktemp("records") / "records.parquet"

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(strategy, max_size=5))
    def check(records: list[Any]) -> None:
        storage.write_records(path, records)
        back = storage.read_records(path, cls)
        assert back == records
        assert repr(back) == repr(records)  # -0.0 is not 0.0, a tuple is not a list

    check()


@dataclass(frozen=True)
class Row:
    value: float
    count: int | None
    share: float | None
    spans: list[tuple[int, int]] | None


def test_floats_to_the_bit_and_optional_fields(tmp_path: Path) -> None:
    rng = random.Random(0)
    bits = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(300)]
    records = [
        Row(x, None if i % 2 else i, None if i % 3 else x, None if i % 5 else [(i, i + 1)]) for i, x in enumerate(bits)
    ]
    storage.write_records(tmp_path / "rows.parquet", records)
    back = storage.read_records(tmp_path / "rows.parquet", Row)
    assert [struct.pack("<d", row.value) for row in back] == [struct.pack("<d", x) for x in bits]
    assert [replace(row, value=0.0, share=0.0) for row in back] == [
        replace(row, value=0.0, share=0.0) for row in records
    ]
    assert [row.share is None for row in back] == [row.share is None for row in records]


TURN = Turn([1, 2], [3, 4], [-0.5, -0.25], "x", True, "m", (0, 1), "search", "q", "o", [5], "stop")


def test_readable_with_pandas(tmp_path: Path) -> None:
    path = tmp_path / "seed=1" / "trajectories.parquet"
    storage.write_records(path, [Trajectory("q", 1, 2, [TURN, replace(TURN, mem_span=None)], None, "max_turns")])
    assert storage.read_records(path, Trajectory)[0].turns[0] == TURN
    frame = pd.read_parquet(path)
    assert frame["question_id"].tolist() == ["q"]
    first, second = frame["turns"][0]
    assert first["mem_span"].tolist() == [0, 1] and second["mem_span"] is None
    assert first["sampling_logprobs"].tolist() == [-0.5, -0.25]


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.99])
def test_half_written_parquet_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "half.parquet"
    storage.write_records(path, [Question(f"q{i}", "?", [["a"]]) for i in range(50)])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(ValueError, match=r"half\.parquet: not a whole Parquet file"):
        storage.read_records(path, Question)


def test_a_flipped_byte_is_not_read_as_data(tmp_path: Path) -> None:
    path = tmp_path / "flipped.parquet"
    storage.write_records(path, [Question(f"question {i}", "?", [["a"]]) for i in range(50)])
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"flipped\.parquet"):
        storage.read_records(path, Question)


def test_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    storage.write_records(path, [Question("q", "?", [["a"]])])
    with pytest.raises(ValueError, match=r"foreign\.parquet: not Sample records: columns \['question_id'"):
        storage.read_records(path, Sample)
    path.write_text('{"not": "parquet"}')
    with pytest.raises(ValueError, match=r"foreign\.parquet: not a whole Parquet file"):
        storage.read_records(path, Question)
    with pytest.raises(FileNotFoundError, match="none"):
        storage.read_records(tmp_path / "none.parquet", Question)


def test_rows_that_are_no_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.parquet"
    storage.write_records(path, [Question("q", "?", [["a"]])])
    frame = pd.read_parquet(path)
    import pyarrow as pa

    frame["golden_answers"] = [[]]
    pa.parquet.write_table(pa.Table.from_pandas(frame, schema=schema_of(Question)), path)
    with pytest.raises(ValueError, match=r"wrong\.parquet: question 'q': every objective needs"):
        storage.read_records(path, Question)


def test_nothing_required_may_be_missing(tmp_path: Path) -> None:
    broken = replace(TURN, text=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="non-nullable"):
        storage.write_records(tmp_path / "t.parquet", [Trajectory("q", 0, 0, [broken], None, "answered")])
    assert list(tmp_path.iterdir()) == []


@given(
    st.recursive(
        st.none() | st.booleans() | INT | FLOAT.filter(lambda x: abs(x) != float("inf")) | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_round_trip(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    storage.write_json(path, value)
    assert storage.read_json(path) == value


def test_json_is_sorted_and_refuses_what_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    storage.write_json(path, {"b": 1, "a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "é",\n  "b": 1\n}\n'
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"value\.json"):
            storage.write_json(path, {"x": value})
    assert storage.read_json(path) == {"a": "é", "b": 1}
    for text in ("NaN", '{"a": 1', "", "\ud83d".encode("utf-8", "surrogatepass").decode("latin-1")):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"value\.json: not whole JSON"):
            storage.read_json(path)


def test_failure_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with storage.whole_file(path) as temporary:
        temporary.write_text("former")
    with pytest.raises(RuntimeError), storage.whole_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "former" and list(path.parent.iterdir()) == [path]


def test_folder_replaces_the_former_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for version in ("one", "two"):
        with storage.whole_folder(path) as temporary:
            (temporary / "inner").mkdir()
            (temporary / "inner" / version).write_text(version)
    assert [item.name for item in path.rglob("*") if item.is_file()] == ["two"]
    with pytest.raises(RuntimeError), storage.whole_folder(path) as temporary:
        (temporary / "three").write_text("half")
        raise RuntimeError
    assert (path / "inner" / "two").read_text() == "two" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere two renames, with a moment between them")
def test_a_replaced_folder_is_never_missing(tmp_path: Path) -> None:
    path = tmp_path / "folder"

    def replace_it() -> None:
        with storage.whole_folder(path) as temporary:
            for name in range(5):
                (temporary / str(name)).write_text("x")

    replace_it()
    stop = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            seen.append((path / "4").exists())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(50):
        replace_it()
    stop.set()
    watcher.join()
    assert len(seen) > 50 and all(seen)


def test_folder_is_replaced_where_an_exchange_is_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.ctypes, "CDLL", lambda *_, **__: object())  # a C library without renameat2
    test_folder_replaces_the_former_one_whole(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from mempo import storage
from mempo.arrow import schema_of
kind, path = sys.argv[1], Path(sys.argv[2])
with getattr(storage, kind)(path) as temporary:
    (temporary if kind == "whole_file" else temporary / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["whole_file", "whole_folder"])
def test_a_killed_write_is_harmless_and_cleaned_later(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kept"

    def write(text: str) -> None:
        with getattr(storage, kind)(path) as temporary:
            (temporary if kind == "whole_file" else temporary / "a").write_text(text)

    write("former")
    before = storage.content_hash(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, kind, str(path)], cwd=os.getcwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # the leftover is there, and nobody takes it for the file
    assert storage.content_hash(tmp_path) == before
    write("next")
    assert list(tmp_path.iterdir()) == [path]
    assert (path if kind == "whole_file" else path / "a").read_text() == "next"


@pytest.mark.parametrize("kind", ["whole_file", "whole_folder"])
@pytest.mark.parametrize("exchange", [True, False])
def test_of_two_writers_the_slower_one_fails_and_publishes_nothing(
    tmp_path: Path, kind: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(storage.ctypes, "CDLL", lambda *_, **__: object())  # as on NFS
    path = tmp_path / "kept"
    whole = getattr(storage, kind)

    def fill(temporary: Path, text: str) -> None:
        (temporary if kind == "whole_file" else temporary / "a").write_text(text)

    with whole(path) as temporary:
        fill(temporary, "former")
    with pytest.raises(storage.Overtaken, match=f"{path}: another process"), whole(path) as slow:
        fill(slow, "slow")
        with whole(path) as fast:
            assert not slow.exists()
            fill(fast, "fast")
        if kind == "whole_file":
            fill(slow, "slow")  # it writes on, at a place of which it has lost the name
            slow.unlink()
    assert (path if kind == "whole_file" else path / "a").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [path]


def test_writes_of_other_names_stay(tmp_path: Path) -> None:
    """A name that begins with another one's, and what only looks like a temporary."""
    others = [".a.b.0123456789ab.tmp", ".a.tmp", ".a.0123456789ab.tmp.x", "a.0123456789ab.tmp", ".b.0123456789ab.tmp"]
    for name in [*others, ".a.0123456789ab.tmp"]:
        (tmp_path / name).write_text("x")
    storage.write_json(tmp_path / "a", 1)
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted([*others, "a"])


WRITERS = """
import sys
from pathlib import Path
from mempo import storage
kind, path, letter = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
sys.stdin.readline()
published = overtaken = 0
while published < 40:
    try:
        with getattr(storage, kind)(path) as temporary:
            if kind == "whole_file":
                temporary.write_text(letter * 200_000)
            else:
                for name in range(8):
                    (temporary / str(name)).write_text(letter * 1000)
        published += 1
    except storage.Overtaken:
        overtaken += 1
print(overtaken)
"""


@pytest.mark.parametrize("kind", ["whole_file", "whole_folder"])
def test_two_processes_write_one_path_and_readers_see_it_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kept"
    arguments = [sys.executable, "-c", WRITERS, kind, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*arguments, letter], **pipes) for letter in "ab"]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen: list[str] = []
    while any(writer.poll() is None for writer in writers):
        if seen or path.exists():  # once there, it is never missing
            seen.append(path.read_text() if kind == "whole_file" else str(path.is_dir()))
    outputs = [writer.communicate() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], outputs
    assert sum(int(output) for output, _ in outputs) > 0, "they never met"
    assert list(tmp_path.iterdir()) == [path]
    if kind == "whole_file":
        assert set(seen) <= {"a" * 200_000, "b" * 200_000}
    else:
        assert set(seen) == {"True"} and sorted(item.name for item in path.iterdir()) == list("01234567")
        assert {item.read_text() for item in path.iterdir()} in ({"a" * 1000}, {"b" * 1000})


def test_content_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    first = storage.content_hash(tmp_path)
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    second = storage.content_hash(tmp_path)
    (tmp_path / "a" / "y").write_text("2")
    assert len({first, second, storage.content_hash(tmp_path)}) == 3
    # sha256("2"), by coreutils
    assert storage.content_hash(tmp_path / "a" / "y").startswith("d4735e3a265e16ee")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        storage.content_hash(tmp_path / "nowhere")


def test_no_records_are_a_whole_file_too(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    storage.write_records(path, [])  # a round in which every tool call failed
    assert storage.read_records(path, Sample) == [] == storage.read_records(path, Question)
    assert pd.read_parquet(path).empty


@pytest.mark.parametrize("library", ["python", "pyarrow", "safetensors"])
def test_a_write_that_the_system_refuses_is_told_with_its_path(tmp_path: Path, library: str) -> None:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, former[1]))
    path = tmp_path / library
    try:
        with pytest.raises(OSError) as refused:
            if library == "python":
                storage.write_json(path, "x" * 10_000)
            elif library == "pyarrow":
                storage.write_records(path, [Question(f"{i}", f"{i * i}", [[f"{i}"]], "") for i in range(1000)])
            else:
                with storage.whole_folder(path) as folder:
                    save_file({"weight": torch.zeros(1000)}, folder / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert str(refused.value) == f"[Errno {errno.EFBIG}] File too large: '{path}'"
    assert list(tmp_path.iterdir()) == []
