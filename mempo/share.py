"""Files of a workspace on a store, for hosts without a common file system: what has a manifest there is whole.

A unit is a file or a folder below the root. Its contents lie under ``files/<unit>/<sha256>`` and never change; its
``manifests/<unit>.json`` is written last, so a reader sees a former unit or the new one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mempo import local, services, storage
from mempo.store import Store

FETCH_S = 24 * 3600.0  # the longest that one process of a host waits for what another fetches


def _inside(name: str) -> str:
    """A name from a store is anybody's until it is known to stay where it belongs."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name or name == ".":
        raise ValueError(f"{name!r} is no name below a folder")
    return name


class Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]


class Manifest(BaseModel):
    """``files``: of a folder by their names in it, of a file the one by its own name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: bool
    files: dict[Annotated[str, AfterValidator(_inside)], Content]


@dataclass(frozen=True, slots=True)
class Share:
    """``url`` None: hosts share ``root`` itself, and nothing is to be done."""

    root: Path
    url: str | None

    def send(self, *paths: Path) -> None:
        """What exists of ``paths`` goes to the store, in this order; what lies there with equal hashes does not."""
        if store := self._store:
            for path in paths:
                if path.exists() and not storage.is_leftover(path.name):
                    self._send(store, path)

    def fetch(self, *paths: Path) -> None:
        """What is missing here comes from the store, every byte held against its sha256; what it lacks stays missing.

        Raises ``ValueError`` naming both files where a hash or a manifest is wrong, ``OSError`` where one is missing.
        """
        missing = [path for path in paths if not path.exists()]
        if missing and (store := self._store):
            # Of several processes of this host one fetches, and the others find what it has fetched.
            with services.locked(local.state_folder(), "fetch", deadline_s=FETCH_S):
                for path in missing:
                    if not path.exists():
                        self._fetch(store, path)

    def agree(self, *paths: Path) -> None:
        """Folders that a run stands on: the store gets those it lacks. Raises ``ValueError`` where it has others."""
        if store := self._store:
            for path in paths:
                former = self._manifest(store, self._unit(path))
                if former is not None and former != _manifest_of(path):
                    raise ValueError(
                        f"{path}: another one than in {store.place}; remove it here to get that one, or share this one "
                        "through another storage.url"
                    )
                if former is None:
                    self._send(store, path)

    def units(self, folder: Path) -> list[Path]:
        """The places below ``folder`` of all units that the store has there; they need not be here."""
        store = self._store
        names = store.names(f"manifests/{self._unit(folder)}") if store else []
        return [folder / _inside(name.removesuffix(".json")) for name in names]

    def fetch_below(self, folder: Path) -> None:
        """All units that the store has below ``folder`` and that are missing here."""
        self.fetch(*self.units(folder))

    def drop(self, *paths: Path) -> None:
        """The store forgets these units: their manifests first, then what they name."""
        if store := self._store:
            for unit in map(self._unit, paths):
                if store.read(f"manifests/{unit}.json") is not None:
                    store.remove(f"manifests/{unit}.json")
                for name in store.names(f"files/{unit}"):
                    store.remove(f"files/{unit}/{name}")

    @property
    def _store(self) -> Store | None:
        return Store(self.url) if self.url else None

    def _unit(self, path: Path) -> str:
        return _inside(path.absolute().relative_to(self.root.absolute()).as_posix())

    def _send(self, store: Store, path: Path) -> None:
        unit, sources, manifest = self._unit(path), _files_of(path), _manifest_of(path)
        former = self._manifest(store, unit)
        if manifest == former:
            return
        kept = {content.sha256 for content in former.files.values()} if former else set()
        for name, source in sources.items():
            if (sha256 := manifest.files[name].sha256) not in kept:
                store.upload(source, f"files/{unit}/{sha256}")
        text = json.dumps(manifest.model_dump(), sort_keys=True, indent=2)
        store.write(f"manifests/{unit}.json", text.encode())

    def _fetch(self, store: Store, path: Path) -> None:
        unit = self._unit(path)
        manifest = self._manifest(store, unit)
        if manifest is None:
            return
        if manifest.folder:
            with storage.whole_folder(path) as temporary:
                for name, content in manifest.files.items():
                    # No parents=True: a folder that another process took away must not come back by half.
                    for inner in reversed(Path(name).parents[:-1]):
                        (temporary / inner).mkdir(exist_ok=True)
                    _download(store, unit, content, temporary / name, path / name)
        elif list(manifest.files) == [path.name]:
            with storage.whole_file(path) as temporary:
                _download(store, unit, manifest.files[path.name], temporary, path)
        else:
            raise ValueError(f"{store.place}/manifests/{unit}.json: not the manifest of the file {path}")

    def _manifest(self, store: Store, unit: str) -> Manifest | None:
        found = store.read(f"manifests/{unit}.json")
        try:
            return None if found is None else Manifest.model_validate_json(found)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ": ".join([f"{store.place}/manifests/{unit}.json", *map(str, problem["loc"])])
            raise ValueError(f"{place}: {problem['msg']}") from None


def _files_of(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.name: path}
    found = (item for item in sorted(path.rglob("*")) if item.is_file())
    names = {item.relative_to(path).as_posix(): item for item in found}
    return {name: item for name, item in names.items() if not any(map(storage.is_leftover, Path(name).parts))}


def _manifest_of(path: Path) -> Manifest:
    return Manifest(folder=path.is_dir(), files={name: _content(file) for name, file in _files_of(path).items()})


def _content(file: Path) -> Content:
    return Content(sha256=storage.content_hash(file), bytes=file.stat().st_size)


def _download(store: Store, unit: str, expected: Content, temporary: Path, path: Path) -> None:
    name = f"files/{unit}/{expected.sha256}"
    try:
        store.download(name, temporary)
    except OSError as error:
        raise type(error)(f"{path}: does not come from {store.place}/{name}: {error}") from error
    if (found := _content(temporary)) != expected:
        raise ValueError(
            f"{path}: {store.place}/{name} is damaged: {found.bytes} bytes of sha256 {found.sha256[:12]}, "
            f"its manifest says {expected.bytes} of {expected.sha256[:12]}"
        )
