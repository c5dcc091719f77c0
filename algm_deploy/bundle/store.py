"""Bundles: folders that runtimes execute, each file named in `manifest.json` with its hash and what it was made from.

A bundle is complete or none. `BundleWriter` fills a hidden folder inside the target and puts all of it in place;
`Bundle.add` puts one more file into a bundle; `Bundle.record` keeps what a step found. A crash leaves the old state or
the new one. Nothing beside the bundle's folder is touched, so that it may be a mount point.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from algm_deploy.bundle.files import (
    LOCK,
    PARTIAL,
    as_new,
    beside,
    ended_in_order,
    locked,
    reading_errors,
    require_utf8,
    sha256_of,
    storage_errors,
    sync,
    workspace,
)
from algm_deploy.bundle.manifest import MANIFEST, checked_name, read_manifest, write_manifest
from algm_deploy.bundle.records import FileEntry, Manifest, Measurement, NotRun, Parity, Step, Stored
from algm_deploy.bundle.signature import Signature
from algm_deploy.environment import environment
from algm_deploy.errors import BundleError
from algm_deploy.recipe.schema import Recipe

Found = TypeVar("Found", bound=Measurement)

_LOG = logging.getLogger("algm_deploy")
# A complete bundle whose files wait to be put in place.
_COMPLETE = ".complete"
# What may lie in a folder that is free for a bundle: names of ours, and what a new file system is born with.
_NO_CONTENT = (LOCK, _COMPLETE, "lost+found")


class Bundle:
    """A complete bundle on disk.

    `open` checks that every listed file is there in its listed size. Hashes are checked when a file is asked for with
    `file`, once per Bundle, together with the files it uses; `verify` checks all of them.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._verified: dict[str, FileEntry] = {}
        self._warned: set[str] = set()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a bundle; BundleError when it is missing, incomplete, unreadable or of another schema."""
        path = Path(path)
        require_utf8(path, BundleError)
        with reading_errors(path, "name another one"):
            if not path.exists():
                raise BundleError(f"expected a bundle at {path}, found nothing: make one with `algm-deploy deploy`")
            _recover(path)
        bundle = cls(path, read_manifest(path))
        for name in bundle.files:
            with suppress(PermissionError):  # only who needs the file has to read it
                bundle._check_presence(name)
        return bundle

    @property
    def recipe(self) -> Recipe:
        """What was decided about this bundle."""
        return self.manifest.recipe

    @property
    def calibrated(self) -> bool:
        """Whether ranges of its products were measured on photos, for its precision."""
        return self.manifest.quantization is not None

    @property
    def cudnn_attends(self) -> bool:
        """Whether it is the dense network that is timed with cuDNN's attention."""
        return self.manifest.variant is not None and self.manifest.variant.name == "dense_cudnn"

    @property
    def files(self) -> _Files:
        """Listed files by name; asking for another one is an error for people."""
        return _Files(self.path, self.manifest.files)

    @property
    def signature(self) -> Signature:
        """What goes in and out of the network.

        Raises:
            BundleError: no export has said so.
        """
        if self.manifest.signature is None:
            raise BundleError(f"{self.path}: expected the signature of a network in its manifest: export it again")
        return self.manifest.signature

    def file(self, name: str) -> Path:
        """Path of a listed file whose content, sources and companions are as the manifest says."""
        if name not in self.manifest.files:
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

    def verify(self) -> None:
        """Checks the hashes of all files anew."""
        self._verified.clear()
        for name in self.files:
            self.file(name)

    def found(self, kind: type[Found], runtime: str) -> Found | None:
        """The record of this kind that was made last on a runtime, None where there is none."""
        records: tuple[Found, ...] = getattr(self.manifest, kind.section)
        return next((one for one in reversed(records) if one.runtime == runtime), None)

    def record(self, record: Stored) -> None:
        """Keeps a record, atomically, in place of one of the same identity; what other processes wrote meanwhile stays.

        With it goes the reason why this step had not run on this runtime.

        Raises:
            BundleError: a value that JSON does not hold, or nothing can be written.
        """

        def change(manifest: Manifest) -> Manifest:
            kept = [one for one in getattr(manifest, record.section) if one.identity != record.identity]
            excuses = tuple(
                one
                for one in manifest.not_run
                if not isinstance(record, Measurement) or (one.step, one.runtime) != (record.step, record.runtime)
            )
            return replace(manifest, **{record.section: (*kept, record)}, not_run=excuses)

        self._change(change)

    def warn_of_failed_parity(self, runtimes: Iterable[str]) -> None:
        """Logs a line, once, for each of these runtimes on which the parity chain failed when it last ran."""
        for runtime in runtimes:
            record = self.found(Parity, runtime)
            if record is None or record.passed or runtime in self._warned:
                continue
            self._warned.add(runtime)
            failed = ", ".join(f"{link.number} {link.name}" for link in record.links if not link.passed)
            _LOG.error(
                "WARNING: %s FAILED the parity chain on %s (%s): trust no result of it before `algm-deploy verify %s "
                "--runtime %s` passes",
                self.path,
                runtime,
                f"link {failed}" if failed else "nothing was compared",
                quote(str(self.path)),
                runtime,
            )

    def note_not_run(self, steps: Iterable[Step], runtime: str, reason: str) -> None:
        """Notes, atomically, why steps did not run on a runtime."""
        new = tuple(NotRun(step=step, runtime=runtime, reason=reason) for step in steps)
        named = {(one.step, one.runtime) for one in new}
        self._change(
            lambda manifest: replace(
                manifest, not_run=(*(o for o in manifest.not_run if (o.step, o.runtime) not in named), *new)
            )
        )

    def require_writable(self) -> None:
        """Refuses a bundle that takes no record, before the work that ends in one.

        Raises:
            BundleError: nothing can be written in its folder.
        """
        manifest = self.path / MANIFEST
        probe = beside(manifest, ".partial")
        with locked(self.path), storage_errors(manifest):
            probe.touch()
            probe.unlink()

    @contextmanager
    def add(self, name: str, made_from: Mapping[str, str] | None = None, uses: tuple[str, ...] = ()) -> Iterator[Path]:
        """Yields a path to write; afterwards the file is part of the bundle, in place of one of the same name."""
        target = self.path / checked_name(name)
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        # The lock is held over announcement and rename: another process may add the same name.
        with storage_errors(target), workspace(self.path) as folder:
            path = folder / target.name
            yield path
            as_new(path, folder / LOCK)
            sync(path)
            entry = _entry(path, made_from, uses)
            with locked(self.path):
                self._change_locked(lambda old: replace(old, replacing={**old.replacing, name: entry}))
                path.replace(target)
                sync(target.parent)
                self._change_locked(lambda manifest: _settled(manifest, name))
        self._verified.pop(name, None)

    def _change(self, change: Callable[[Manifest], Manifest]) -> None:
        with locked(self.path):
            self._change_locked(change)

    def _change_locked(self, change: Callable[[Manifest], Manifest]) -> None:
        self.manifest = write_manifest(self.path, change(read_manifest(self.path)))

    def _candidates(self, name: str) -> list[FileEntry]:
        return [entries[name] for entries in (self.manifest.files, self.manifest.replacing) if name in entries]

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
            with reading_errors(self.path / name):
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
        """What is said of a name that the manifest does not list."""
        return BundleError(
            f"{self._bundle}: expected a file of this bundle, got {name!r:.100}: build it first, there are "
            f"{', '.join(self)}"
        )


class BundleWriter:
    """Writes a new bundle as a whole; an existing one at the same path is replaced only when the new one is complete.

        with BundleWriter(path, recipe) as writer:
            export_to(writer.path("model.onnx"))
            writer.list_file("model.onnx", made_from={"checkpoint.pth": sha256})
            writer.describe(signature=signature)
        bundle = Bundle.open(path)

    An exception inside the block leaves the old state.
    """

    def __init__(self, path: str | Path, recipe: Recipe) -> None:
        self.target = Path(path).resolve()  # a link stays, what it points to is replaced
        self.recipe = recipe
        self._facts: dict[str, Any] = {}
        self._entries: dict[str, FileEntry] = {}

    def __enter__(self) -> Self:
        require_utf8(self.target, BundleError)
        _check_free(self.target)
        with ExitStack() as held:
            held.enter_context(ended_in_order())
            held.enter_context(storage_errors(self.target, self.target))
            held.enter_context(_made(self.target))
            self.folder = held.enter_context(workspace(self.target))
            self._held = held.pop_all()
        return self

    def path(self, name: str) -> Path:
        """Where to write a file of the bundle before it is listed."""
        path = self.folder / checked_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def list_file(self, name: str, made_from: Mapping[str, str] | None = None, uses: tuple[str, ...] = ()) -> FileEntry:
        """Lists a written file in the manifest; returns its entry, whose sha256 is a source for later files."""
        path = self.path(name)
        if not path.is_file():
            raise BundleError(f"expected {name} written before it is listed, found none at {path}")
        as_new(path, self.folder / LOCK)
        self._entries[name] = _entry(path, made_from, uses)
        return self._entries[name]

    def describe(self, **facts: Any) -> None:
        """Sets fields of the manifest, such as `signature`."""
        self._facts |= facts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if error is not None:
                raise error
            self._finish()

    def _finish(self) -> None:
        written = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        written.discard(LOCK)
        if written != set(self._entries):
            raise BundleError(
                f"expected every file of the bundle listed, {sorted(written ^ set(self._entries))} differ"
            )
        files = dict(sorted(self._entries.items()))
        write_manifest(self.folder, Manifest(environment=environment(), recipe=self.recipe, files=files, **self._facts))
        for name in self._entries:
            sync(self.folder / name)
        with locked(self.target):
            _check_free(self.target)
            _put_in_place(self.target)  # what another process left
            sync(self.folder)
            self.folder.rename(self.target / _COMPLETE)
            sync(self.target)
            _put_in_place(self.target)


def _entry(path: Path, made_from: Mapping[str, str] | None, uses: tuple[str, ...]) -> FileEntry:
    return FileEntry(sha256=sha256_of(path), size_bytes=path.stat().st_size, made_from=dict(made_from or {}), uses=uses)


def _settled(manifest: Manifest, name: str) -> Manifest:
    """A file that was being replaced is in place."""
    replacing = {other: entry for other, entry in manifest.replacing.items() if other != name}
    return replace(manifest, files={**manifest.files, name: manifest.replacing[name]}, replacing=replacing)


def _check_free(target: Path) -> None:
    with storage_errors(target, target):
        names = {entry.name for entry in target.iterdir()} if target.is_dir() else set()
    taken = any(name not in _NO_CONTENT and not name.endswith(PARTIAL) for name in names)
    if target.is_file() or (taken and not {MANIFEST, _COMPLETE} & names):
        raise BundleError(f"expected a bundle or a free name at {target}, found something else: choose another name")


@contextmanager
def _made(target: Path) -> Iterator[None]:
    """The folder of a bundle is there in the block, and afterwards where it holds something or was there before."""
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError), locked(target):
            if [entry.name for entry in target.iterdir()] == [LOCK]:
                (target / LOCK).unlink()
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


def _put_in_place(target: Path) -> None:
    """Gives the files of a complete bundle that waits in `target` their places, and removes those of the old one.

    Called with the lock held. Every step can be done again: after a crash whoever comes next goes on.
    """
    new = target / _COMPLETE
    if (new / MANIFEST).is_file():
        names = (*read_manifest(new).files, MANIFEST)  # the manifest at last
        _remove_others(target, names)
        for name in names:
            if (new / name).exists():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).replace(target / name)
        sync(target)
    shutil.rmtree(new, ignore_errors=True)


def _remove_others(target: Path, names: Iterable[str]) -> None:
    """Removes what a new bundle with these files does not have; folders that another process works in stay."""
    for path in sorted(target.rglob("*"), reverse=True):  # what is in a folder before the folder
        name = path.relative_to(target).as_posix()
        top, _, _ = name.partition("/")
        if name in names or top in _NO_CONTENT or top.endswith(PARTIAL):
            continue
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty, or a mount point of its own
                path.rmdir()
        else:
            path.unlink()


def _recover(path: Path) -> None:
    """Goes on with a replacement that was stopped before all files were in place."""
    if (path / _COMPLETE).is_dir():
        with locked(path):
            _put_in_place(path)
