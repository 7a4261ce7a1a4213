"""One suite for every kind of store: a local path, fsspec's own memory, S3 (a real server of it on 127.0.0.1)."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from mempo import storage
from mempo.config import Storage
from mempo.share import Share
from mempo.store import Store
from tests.buckets import port_of, server


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def fill(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def contents(root: Path) -> dict[str, bytes]:
    return {item.relative_to(root).as_posix(): item.read_bytes() for item in root.rglob("*") if item.is_file()}


def stored(url: str, below: str = "") -> list[str]:
    return Store(url).names(below)


# --- bytes under names -----------------------------------------------------------------------------------------------


def test_what_is_written_is_read(url: str, tmp_path: Path) -> None:
    store = Store(url)
    assert store.read("a/b") is None and store.names("a") == []
    store.write("a/b", b"\x00one")
    store.write("a/b", b"two")
    store.write("a/c/d", b"")
    store.write("ab", b"no file of a's")
    assert store.read("a/b") == b"two" and store.read("a/c/d") == b""
    assert store.names("a") == ["b", "c/d"]
    (tmp_path / "from").write_bytes(b"x" * 100_000)
    store.upload(tmp_path / "from", "up/x")
    store.download("up/x", tmp_path / "to")
    assert (tmp_path / "to").read_bytes() == b"x" * 100_000
    store.remove("a/b")
    assert store.read("a/b") is None


def test_of_many_that_create_a_file_one_does(url: str) -> None:
    if url.startswith("memory"):
        pytest.skip("memory:// is one process's and has no lock")
    store, start = Store(url), threading.Barrier(6)

    def create(index: int) -> bool:
        start.wait()
        return store.create("locks/x", str(index).encode())

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(create, range(6)))
    assert sum(made) == 1 and store.read("locks/x") == str(made.index(True)).encode()


def test_errors_name_the_place(tmp_path: Path, bucket: str) -> None:
    (tmp_path / "file").write_text("")
    for url in (f"file://{tmp_path}/file", "s3://no-such-bucket"):
        with pytest.raises(OSError, match=f"{url}/below/x: "):
            Store(url).write("below/x", b"")
    with pytest.raises(FileNotFoundError, match=f"{bucket}/none: "):
        Store(bucket).download("none", tmp_path / "x")
    with pytest.raises(ValueError, match="Protocol not known: nosuch"):
        Store("nosuch://x")


@pytest.mark.parametrize("url", ["s3://key:secret@bucket", "https://x/y?token=secret", "/mnt/x", "s3://", "a::s3://b"])
def test_urls_with_secrets_and_of_other_forms_are_refused_unseen(url: str) -> None:
    with pytest.raises(ValueError, match=r"storage\.url: expected a URL as in s3://bucket/prefix") as refused:
        Storage.model_validate({"url": url})
    assert "secret" not in str(refused.value.errors(include_input=False))  # type: ignore[attr-defined]
    assert Storage(url="s3://bucket/a/prefix").lease_s == 60


# --- units of a workspace --------------------------------------------------------------------------------------------

POLICY = {"runs/r/policy_0001/a.json": b"{}", "runs/r/policy_0001/deep/w.bin": b"\x00" * 999, "data/x": b""}


def test_files_and_folders_arrive_as_they_were(url: str, here: Path, there: Path) -> None:
    fill(here, POLICY | {"runs/r/policy_0001/.half.0123456789ab.tmp": b"half", "data/.y.0123456789ab.tmp": b"half"})
    units = [Path("runs/r/policy_0001"), Path("data/x"), Path("data/none"), Path("data/.y.0123456789ab.tmp")]
    Share(here, url).send(*(here / unit for unit in units))
    Share(there, url).fetch(*(there / unit for unit in units))
    assert contents(there) == POLICY


def test_all_below_a_folder_arrives_and_what_is_here_stays(url: str, here: Path, there: Path) -> None:
    fill(here, {"r/0/a": b"1", "r/0/parts/b": b"2", "r/0/whole/c": b"3", "r/1/a": b"4", "r/00": b"5"})
    units = ("r/0/a", "r/0/parts/b", "r/0/whole", "r/1/a", "r/00")
    Share(here, url).send(*(here / unit for unit in units))
    fill(there, {"r/0/a": b"mine"})
    Share(there, url).fetch_below(there / "r" / "0")
    assert contents(there) == {"r/0/a": b"mine", "r/0/parts/b": b"2", "r/0/whole/c": b"3"}


def test_a_unit_that_was_made_again_is_sent_whole_again(url: str, here: Path, there: Path) -> None:
    share = Share(here, url)
    for files in ({"p/a": b"1", "p/b": b"2"}, {"p/a": b"1", "p/c": b"3"}):
        with storage.whole_folder(here / "p") as folder:
            fill(folder, {name.removeprefix("p/"): data for name, data in files.items()})
        share.send(here / "p")
    Share(there, url).fetch(there / "p")
    assert contents(there) == {"p/a": b"1", "p/c": b"3"}


def test_what_the_store_has_is_not_sent_again_and_damage_is_named(url: str, here: Path, there: Path) -> None:
    fill(here, POLICY)
    policy = Path("runs/r/policy_0001")
    Share(here, url).send(here / policy)
    name = storage.content_hash(here / policy / "deep" / "w.bin")
    assert name in stored(url, f"files/{policy}")
    Store(url).write(f"files/{policy}/{name}", b"\x00" * 998 + b"\x01")
    Share(here, url).send(here / policy)
    damaged = rf"{there / policy}/deep/w\.bin: .*/files/{policy}/{name} is damaged: 999 bytes of sha256 .*, its manif"
    with pytest.raises(ValueError, match=damaged):
        Share(there, url).fetch(there / policy)
    Store(url).remove(f"files/{policy}/{name}")
    with pytest.raises(FileNotFoundError, match=rf"{there / policy}/deep/w\.bin: does not come from .*/{name}"):
        Share(there, url).fetch(there / policy)
    assert contents(there) == {}


def test_what_has_no_manifest_is_not_there(url: str, here: Path, there: Path) -> None:
    """A sender that is killed has written files, and no manifest."""
    fill(here, POLICY)
    Share(here, url).send(here / "data" / "x")
    Store(url).remove("manifests/data/x.json")
    Share(there, url).fetch(there / "data" / "x")
    Share(there, url).fetch_below(there / "data")
    assert contents(there) == {} and len(stored(url, "files")) == 1


HOSTILE = ["/etc/x", "../x", "a/../../x", "a/..", "a\\..\\x", "", ".", "a//b", "a/", "./a", "a\0b"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_manifest_names_a_file_outside_its_unit(tmp_path: Path, name: str) -> None:
    url, content = f"memory://{uuid4().hex}", {"sha256": "0" * 64, "bytes": 0}
    Store(url).write("manifests/a/p.json", json.dumps({"folder": True, "files": {name: content}}).encode())
    with pytest.raises(ValueError, match=r"manifests/a/p\.json: files: .*no name below a folder"):
        Share(tmp_path, url).fetch(tmp_path / "a" / "p")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "Invalid JSON"), ('{"folder": true}', "files"), ('{"folder": false, "files": {"q": %s}}', "not the manifest"),
     ('{"folder": true, "files": {"q": {"sha256": "../../x", "bytes": 1}}}', "sha256")],
)  # fmt: skip
def test_what_is_no_manifest_is_named(tmp_path: Path, text: str, problem: str) -> None:
    url = f"memory://{uuid4().hex}"
    text = text.replace("%s", json.dumps({"sha256": "0" * 64, "bytes": 0}))
    Store(url).write("manifests/a/p.json", text.encode())
    with pytest.raises(ValueError, match=rf"manifests/a/p\.json.*{problem}"):
        Share(tmp_path, url).fetch(tmp_path / "a" / "p")


def test_only_what_lies_below_the_root_is_shared(tmp_path: Path) -> None:
    fill(tmp_path, {"outside": b"", "root/inside": b""})
    for path in (tmp_path / "outside", tmp_path / "root" / ".." / "outside", tmp_path / "root"):
        with pytest.raises(ValueError):
            Share(tmp_path / "root", f"memory://{uuid4().hex}").send(path)


def test_without_a_url_nothing_happens(tmp_path: Path) -> None:
    share = Share(tmp_path, None)
    share.send(tmp_path / "none")
    share.fetch(tmp_path / "none")
    share.fetch_below(tmp_path)
    assert list(tmp_path.iterdir()) == []


NAMES = st.text("ab.~ é中%#", min_size=1, max_size=5).filter(lambda name: name not in (".", ".."))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.binary(max_size=64), min_size=1))
def test_any_folder_arrives_as_it_was(url: str, tmp_path: Path, files: dict[tuple[str, ...], bytes]) -> None:
    root, url = tmp_path / uuid4().hex, f"{url}/{uuid4().hex}"
    for parts, data in files.items():
        path = root.joinpath("here", "unit", *parts)
        if not any(parent.is_file() for parent in path.parents) and not path.is_dir():
            fill(path.parent, {path.name: data})
    Share(root / "here", url).send(root / "here" / "unit")
    Share(root / "there", url).fetch(root / "there" / "unit")
    assert contents(root / "there") == contents(root / "here")


def test_a_store_that_is_away_for_a_moment_is_waited_for(
    bucket: str, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3fs import S3FileSystem

    fill(here, POLICY)
    first = server()
    first.start()
    port = port_of(first)
    first.stop()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    S3FileSystem.clear_instance_cache()
    second = server(port)
    threading.Timer(1.0, second.start).start()
    Share(here, f"{bucket}/away").send(here / "data" / "x")
    Share(there, f"{bucket}/away").fetch(there / "data" / "x")
    assert contents(there) == {"data/x": b""}
    second.stop()
    S3FileSystem.clear_instance_cache()


def test_what_is_dropped_is_gone_from_the_store_and_stays_here(url: str, here: Path, there: Path) -> None:
    fill(here, {"run/policy_0001/model": b"one", "run/policy_0001/more/config": b"{}", "run/policy_00010": b"another"})
    Share(here, url).send(here / "run" / "policy_0001", here / "run" / "policy_00010")
    Share(here, url).drop(here / "run" / "policy_0001", here / "never sent")
    Share(there, url).fetch_below(there / "run")
    assert contents(there) == {"run/policy_00010": b"another"}
    assert not any("run/policy_0001/" in name for name in stored(url))
    assert (here / "run" / "policy_0001" / "model").read_bytes() == b"one"


def test_many_that_fetch_one_folder_at_a_time_find_it_whole(url: str, here: Path, there: Path) -> None:
    files = {f"run/policy/{folder}/{index}": b"x" * 1000 for folder in ("a", "b/c") for index in range(20)}
    fill(here, files)
    Share(here, url).send(here / "run" / "policy")
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: Share(there, url).fetch(there / "run" / "policy"), range(12)))
    assert {name: data for name, data in contents(there).items() if name.startswith("run/")} == files


def test_what_runs_stand_on_is_the_same_on_every_host_or_refused(url: str, here: Path, there: Path) -> None:
    fill(here, {"data/questions/corpus": b"one"})
    Share(here, url).agree(here / "data" / "questions")
    Share(there, url).fetch(there / "data" / "questions")
    Share(there, url).agree(there / "data" / "questions")
    (there / "data" / "questions" / "corpus").write_bytes(b"another")
    with pytest.raises(ValueError, match=f"^{there}/data/questions: another one than in "):
        Share(there, url).agree(there / "data" / "questions")
    assert Share(here, url).units(here / "data") == [here / "data" / "questions"]
    assert Share(here, None).units(here / "data") == []
