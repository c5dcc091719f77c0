"""Bundles: folders that runtimes execute, each file named in `manifest.json` with its hash and what it was made from.

A bundle appears complete or not at all. `BundleWriter` fills a folder beside the target and renames it; `Bundle.add`
puts one more file into a bundle; `Bundle.update` changes facts in the manifest. A crash leaves the old state or the
new one.

The manifest holds `schema`, `environment`, `recipe` (with threshold defaults, token order and batch semantics under
`merging`), `files`, and facts that the steps add under names of their own, such as `inputs`, `outputs`,
`preprocessing_sha256`, `parity` or `parsed_network`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

from algm_deploy.environment import environment
from algm_deploy.errors import BundleError, RecipeError
from algm_deploy.facts import NOT_RUN, SECTIONS, checked_fact, checked_record
from algm_deploy.recipes import Recipe, from_table, to_table

SCHEMA = 1
MANIFEST = "manifest.json"
_RESERVED = {"schema", "environment", "recipe", "files", "replacing"}
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


@dataclass(frozen=True)
class FileEntry:
    """A file of a bundle. `made_from` maps a source's name to its sha256; `uses` names files that it cannot do without.

    A source that is itself a file of the bundle must still have that hash, otherwise the entry is out of date.
    """

    sha256: str
    size_bytes: int
    made_from: dict[str, str] = field(default_factory=dict)
    uses: tuple[str, ...] = ()


class Bundle:
    """A complete bundle on disk.

    `open` checks that every listed file is there in its listed size. Hashes are checked when a file is asked for with
    `file`, once per Bundle, together with the files it uses; `verify` checks all of them.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._verified: dict[str, FileEntry] = {}
        self._read(manifest)

    def _read(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        try:
            self.recipe: Recipe = from_table(manifest["recipe"], str(self.path / MANIFEST))
            self.files = _Files(self.path, {name: _entry(name, table) for name, table in manifest["files"].items()})
            # What a process that was stopped in `add` may already have put in place.
            self._replacing = {name: _entry(name, table) for name, table in manifest.get("replacing", {}).items()}
        except (KeyError, TypeError, AttributeError, ValueError, RecipeError) as error:
            raise BundleError(
                f"{self.path / MANIFEST}: expected the facts of a bundle, got {_reason(error)}: export it again"
            ) from error
        _check_sections(self.path, manifest)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a bundle; BundleError when it is missing, incomplete or of another schema."""
        path = Path(path)
        _recover(path)
        if not path.exists():
            raise BundleError(f"expected a bundle at {path}, found nothing: make one with `algm-deploy deploy`")
        bundle = cls(path, _read_manifest(path))
        for name in bundle.files:
            bundle._check_presence(name)
        return bundle

    def file(self, name: str) -> Path:
        """Path of a listed file whose content, sources and companions are as the manifest says."""
        if name not in self.files:
            raise self.files.unlisted(name)
        entry = self._check_hash(name)
        for source, sha256 in entry.made_from.items():
            if source in self.files and sha256 not in [entry.sha256 for entry in self._candidates(source)]:
                raise BundleError(
                    f"{self.path}: expected {name} made from its {source}, which changed since: build it again"
                )
        for companion in entry.uses:
            self._check_hash(companion)
        return self.path / name

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact of the manifest, or the default where one is given and no step has put it there.

        Raises:
            BundleError: neither is there, or the fact is not of its shape (`facts.py`).
        """
        if name not in self.manifest and default is not None:
            return default
        if name not in self.manifest:
            raise BundleError(f"{self.path}: expected {name!r:.100} in its manifest: run the step that writes it")
        with _edited(self.path):
            return checked_fact(name, self.manifest[name])

    def section(self, name: str) -> dict[str, Any]:
        """One of `SECTIONS`, such as `parity` by runtime; empty where no step has written to it yet.

        Raises:
            BundleError: a record is not of its section's shape (`facts.py`).
        """
        records = _section(self.path, self.manifest, name)
        with _edited(self.path):
            return {key: checked_record(name, key, record) for key, record in records.items()}

    def verify(self) -> None:
        """Checks the hashes of all files anew."""
        self._verified.clear()
        for name in self.files:
            self.file(name)

    def update(self, facts: Mapping[str, Any]) -> None:
        """Sets facts in the manifest, atomically and on top of what other processes wrote; `None` removes a fact."""
        _check_facts(facts)
        self._change(lambda manifest: _set(manifest, facts))

    def record(self, section: str, key: str, value: Mapping[str, Any]) -> None:
        """Sets one entry of a section, atomically; entries that other processes wrote meanwhile stay.

        With it goes the reason why this step had not run on the runtime that the key starts with.
        """

        def change(manifest: dict[str, Any]) -> None:
            manifest[section] = {**_section(self.path, manifest, section), key: dict(value)}
            _excuse(manifest, [f"{section} {key.partition(' ')[0]}"], None)

        self._change(change)

    def require_writable(self) -> None:
        """Refuses a bundle that takes no record, before the work that ends in one.

        Raises:
            BundleError: nothing can be written in its folder or beside it.
        """
        manifest = self.path / MANIFEST
        probe = _beside(manifest, ".partial")
        with _locked(self.path), _storage_errors(manifest):
            probe.touch()
            probe.unlink()

    def not_run(self, steps: Iterable[str], reason: str) -> None:
        """Notes, atomically, why steps did not run; a step is named with its runtime, such as `parity tensorrt`."""
        self._change(lambda manifest: _excuse(manifest, steps, reason))

    @contextmanager
    def add(self, name: str, made_from: Mapping[str, str] | None = None, uses: tuple[str, ...] = ()) -> Iterator[Path]:
        """Yields a path to write; afterwards the file is part of the bundle, in place of one of the same name."""
        target = self.path / _checked_name(name)
        with _storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:  # the lock, over announcement and rename: another process may add the same name

            def announce(written: Path) -> None:
                entry = asdict(FileEntry(sha256_of(written), written.stat().st_size, dict(made_from or {}), uses))
                held.enter_context(_locked(self.path))
                self._change_locked(lambda manifest: manifest.setdefault("replacing", {}).update({name: entry}))

            with write_atomically(target, announce) as path:
                yield path
            self._change_locked(lambda manifest: _settle(manifest, name))
        self._verified.pop(name, None)

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        with _locked(self.path):
            self._change_locked(change)

    def _change_locked(self, change: Callable[[dict[str, Any]], None]) -> None:
        manifest = _read_manifest(self.path)
        change(manifest)
        _check_sections(self.path, manifest)
        self._read(_write_manifest(self.path, manifest))

    def _candidates(self, name: str) -> list[FileEntry]:
        return [entries[name] for entries in (self.files, self._replacing) if name in entries]

    def _check_presence(self, name: str) -> None:
        path, candidates = self.path / name, self._candidates(name)
        if not candidates or not path.is_file():
            raise BundleError(
                f"{self.path}: expected {name}, found none in folder or manifest: copy or export it again"
            )
        size = path.stat().st_size
        if size not in [entry.size_bytes for entry in candidates]:
            raise BundleError(
                f"{path}: expected {candidates[0].size_bytes} bytes, got {size}: it was cut or changed, export it again"
            )

    def _check_hash(self, name: str) -> FileEntry:
        if name not in self._verified:
            self._check_presence(name)
            sha256 = sha256_of(self.path / name)
            found = [entry for entry in self._candidates(name) if entry.sha256 == sha256]
            if not found:
                raise BundleError(
                    f"{self.path / name}: expected the content that the manifest lists, got another: it was edited or "
                    "swapped, export or build it again"
                )
            self._verified[name] = found[0]
        return self._verified[name]


class _Files(dict[str, FileEntry]):
    """Listed files by name; asking for another one is an error for people."""

    def __init__(self, bundle: Path, entries: Mapping[str, FileEntry]) -> None:
        super().__init__(entries)
        self._bundle = bundle

    def __missing__(self, name: str) -> FileEntry:
        raise self.unlisted(name)

    def unlisted(self, name: str) -> BundleError:
        return BundleError(
            f"{self._bundle}: expected a file of this bundle, got {name!r:.100}: build it first, there are "
            f"{', '.join(self)}"
        )


class BundleWriter:
    """Writes a new bundle as a whole; an existing one at the same path is replaced only when the new one is complete.

        with BundleWriter(path, recipe) as writer:
            export_to(writer.path("model.onnx"))
            writer.record("model.onnx", made_from={"checkpoint.pth": sha256})
            writer.facts["inputs"] = ...
        bundle = Bundle.open(path)

    An exception inside the block leaves the old state.
    """

    def __init__(self, path: str | Path, recipe: Recipe) -> None:
        self.target = Path(path).resolve()  # a link stays, what it points to is replaced
        self.recipe = recipe
        self.facts: dict[str, Any] = {}
        self._entries: dict[str, FileEntry] = {}

    def __enter__(self) -> Self:
        _recover(self.target)
        _check_free(self.target)
        self.folder = _beside(self.target, ".partial")
        with _storage_errors(self.target):
            self.folder.mkdir(parents=True)
        return self

    def path(self, name: str) -> Path:
        """Where to write a file of the bundle before it is recorded."""
        path = self.folder / _checked_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def record(self, name: str, made_from: Mapping[str, str] | None = None, uses: tuple[str, ...] = ()) -> FileEntry:
        """Lists a written file in the manifest; returns its entry, whose sha256 is a source for later files."""
        path = self.path(name)
        if not path.is_file():
            raise BundleError(f"expected {name} written before it is recorded, found none at {path}")
        self._entries[name] = FileEntry(sha256_of(path), path.stat().st_size, dict(made_from or {}), uses)
        return self._entries[name]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with _storage_errors(self.target):
                if error is not None:
                    raise error
                self._finish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _finish(self) -> None:
        _check_facts(self.facts)
        written = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        if written != set(self._entries):
            raise BundleError(
                f"expected every file of the bundle recorded, {sorted(written ^ set(self._entries))} differ"
            )
        manifest = {
            "schema": SCHEMA,
            "environment": asdict(environment()),
            "recipe": to_table(self.recipe),
            "files": {name: asdict(entry) for name, entry in sorted(self._entries.items())},
            **self.facts,
        }
        _write_manifest(self.folder, manifest)
        for name in self._entries:
            _sync(self.folder / name)
        _swap(self.folder, self.target)


@contextmanager
def write_atomically(path: Path, before_rename: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yields a path beside `path`; after the block it takes the place of `path`, after an exception it is gone."""
    temporary = _beside(path, path.suffix)
    try:
        with _storage_errors(path):
            yield temporary
            _sync(temporary)
            if before_rename:
                before_rename(temporary)
            temporary.replace(path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------------- manifests


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise BundleError(f"{path}: expected a bundle with {MANIFEST}, found none: name the folder that `deploy` wrote")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{file}: expected JSON, got {_reason(error)}: copy or export the bundle again") from error
    version = manifest.get("schema") if isinstance(manifest, dict) else None
    if version != SCHEMA:
        raise BundleError(f"{file}: expected bundle schema {SCHEMA}, got {version!r:.100}: export it with this release")
    return dict(manifest)


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Writes it, and returns what a reader will find."""
    try:
        text = json.dumps(manifest, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BundleError(f"expected finite JSON values as facts of a manifest, got {_reason(error)}") from error
    with write_atomically(folder / MANIFEST) as path:
        path.write_text(text + "\n", encoding="utf-8")
    return dict(json.loads(text))


def _entry(name: str, table: Mapping[str, Any]) -> FileEntry:
    _checked_name(name)
    sha256, size = table["sha256"], table["size_bytes"]
    if not isinstance(sha256, str) or not isinstance(size, int):
        raise TypeError(f"{name} without hash or size")
    return FileEntry(sha256, size, dict(table["made_from"]), tuple(map(_checked_name, table["uses"])))


def _checked_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or name == MANIFEST:
        raise BundleError(f"expected a relative path inside the bundle, got {name!r:.100}")
    return name


def _section(path: Path, manifest: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    section = manifest.get(name, {})
    if not isinstance(section, dict) or not all(isinstance(entry, dict) for entry in section.values()):
        raise BundleError(
            f"{path / MANIFEST}: expected a table of tables as {name}, got {section!r:.100}: export the bundle again"
        )
    return section


@contextmanager
def _edited(path: Path) -> Iterator[None]:
    """Names the manifest in which something is not what a step wrote."""
    try:
        yield
    except RecipeError as error:
        said = " ".join(str(error).split())[:400]
        raise BundleError(
            f"{path / MANIFEST}: {said}: it was edited, remove that entry and run the step that writes it"
        ) from error


def _check_sections(path: Path, manifest: Mapping[str, Any]) -> None:
    for name in SECTIONS:
        _section(path, manifest, name)


def _check_facts(facts: Iterable[str]) -> None:
    taken = sorted(set(facts) & _RESERVED)
    if taken:
        raise BundleError(
            f"expected facts under names of their own, got {', '.join(taken)}, which the bundle itself keeps"
        )


def _excuse(manifest: dict[str, Any], steps: Iterable[str], reason: str | None) -> None:
    """Sets the reason why steps did not run, or removes it."""
    reasons = {**manifest.get(NOT_RUN, {}), **dict.fromkeys(steps, reason)}
    _set(manifest, {NOT_RUN: {step: why for step, why in reasons.items() if why is not None} or None})


def _set(manifest: dict[str, Any], facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if value is None:
            manifest.pop(name, None)
        else:
            manifest[name] = value


def _settle(manifest: dict[str, Any], name: str) -> None:
    manifest["files"][name] = manifest["replacing"].pop(name)
    if not manifest["replacing"]:
        del manifest["replacing"]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0][:200]


# ---------------------------------------------------------------------------------------------------- on the disk


def _check_free(target: Path) -> None:
    taken = target.is_file() or (target.is_dir() and not (target / MANIFEST).is_file() and any(target.iterdir()))
    if taken:
        raise BundleError(f"expected a bundle or a free name at {target}, found something else: choose another name")


def _swap(new: Path, target: Path) -> None:
    """Puts a complete folder in place of `target`. Between the two renames `_recover` brings the old one back."""
    with _locked(target):
        _check_free(target)
        _sync(new)
        old = _aside(target)
        if target.exists():
            target.rename(old)
        new.rename(target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def _recover(path: Path) -> None:
    """Undoes a replacement that was stopped between its two renames."""
    if path.exists() or not _aside(path).exists():
        return
    with _locked(path):
        if not path.exists():
            _aside(path).rename(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _beside(path: Path, suffix: str) -> Path:
    """A hidden name of its own in the same folder, so that a rename stays on one file system."""
    return path.with_name(f".{path.stem}.{secrets.token_hex(4)}{suffix}")


@contextmanager
def _locked(bundle: Path) -> Iterator[None]:
    """Holds the lock of a bundle, an empty hidden file beside it; other processes wait for it to rename or update."""
    bundle = bundle.resolve()  # whatever name a process knows it by
    with _storage_errors(bundle), bundle.with_name(f".{bundle.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, or a folder around `path` without write permission, into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in _WRITE_ERRORS and not str(error.filename).startswith(str(path.parent)):
            raise
        raise BundleError(
            f"expected to write {path}, got {error.strerror}: free space or choose another place"
        ) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
