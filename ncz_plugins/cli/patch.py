"""`ncz patch`: turn safetensors files into patches and back."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from rich.text import Text

from ..core.errors import ConfigError, FrameError, MismatchError, NczError, PatchKeyError, UnsupportedError
from ..core.whole_files import write_whole
from .output import add_row, list_commands, progress_bar, size, table, unbroken_console

if TYPE_CHECKING:
    from ..weights.files import WeightFile


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("patch", help="turn versions of weights (.safetensors) into patches, and back")
    list_commands(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    make = actions.add_parser("make", help="write what has changed between two files or checkpoints, or all of one")
    make.add_argument("new", help="the new version: a .safetensors file, or the folder of a checkpoint")
    make.add_argument(
        "patch", help="the file to write, - is standard output; of a checkpoint: the folder of versions to add it to"
    )
    make.add_argument(
        "--base",
        metavar="OLD",
        help="the version that the receiver has, .safetensors; without it the patch holds a whole version. Of a "
        "checkpoint: the one that was added before, if its folder is there; otherwise it is made again",
    )
    make.add_argument(
        "--whole-every", type=int, default=16, metavar="N", help="checkpoints: a whole version after N (default 16)"
    )
    make.add_argument("--keep", type=int, metavar="N", help="checkpoints: keep N versions, and what they are made of")
    make.set_defaults(run=_make, outputs={"patch": "patch"})
    apply = actions.add_parser("apply", help="write the new version, to the bit")
    apply.add_argument(
        "patch", nargs="+", help="what `ncz patch make` wrote; the patches of all ranks, if several made the version"
    )
    apply.add_argument("new", help="the .safetensors file to write, - is standard output; of a checkpoint: its folder")
    apply.add_argument("--base", metavar="OLD", help="the version that the patch is for; the checkpoint that you hold")
    apply.add_argument("--version", type=int, metavar="N", help="checkpoints: version N, not the newest")
    apply.set_defaults(run=_apply, outputs={"new": "new"})
    show = actions.add_parser("show", help="list what is in a patch, or the versions in a folder")
    show.add_argument("patch", help="what `ncz patch make` wrote")
    show.set_defaults(run=_show)
    verify = actions.add_parser("verify", help="read all files of a folder of versions, or of a checkpoint out of one")
    verify.add_argument("folder", help="what `ncz patch make` or `apply` wrote")
    verify.set_defaults(run=_verify)
    for action in (make, apply, show, verify):
        action.add_argument(
            "--key-file", metavar="FILE", help="secret of 16 bytes or more: patches and versions have a keyed checksum"
        )


# ------------------------------------------------------------------ files


def _make(options: argparse.Namespace) -> None:
    if os.path.isdir(options.new):
        return _publish(options)
    key = _key(options)
    from ..weights.files import make_file_patch

    new = _read(options.new)
    patch = make_file_patch(new, None if options.base is None else _read(options.base), key)
    with _writing(options.patch):
        write_whole(options.patch, patch)
    whole = sum(form.total_bytes for form in new.forms.values())
    fewer = f", {whole / len(patch):.1f} times fewer than its {size(whole)}"
    unbroken_console().print(Text(f"{options.patch}: {size(len(patch))}{fewer}"))


def _apply(options: argparse.Namespace) -> None:
    if os.path.isdir(options.patch[0]):
        return _fetch(options)
    key = _key(options)
    from ..weights.apply import read_patches
    from ..weights.files import FileBytes, apply_file_patch, require_base_file

    # A base that is written over in place must not be read any more while that happens.
    is_replaced = options.base is not None and _is_same_file(options.base, options.new)
    base = None if options.base is None else _read(options.base, is_replaced)
    patches = [_content(each) for each in options.patch]
    with _writing(options.new), _naming(", ".join(options.patch)):
        version = read_patches(patches, key)
        require_base_file(version, base)
        made = apply_file_patch(version, base)
        write_whole(options.new, FileBytes(made))
    unbroken_console().print(Text(f"{options.new}: {len(made.forms)} tensors"))


def _show(options: argparse.Namespace) -> None:
    if os.path.isdir(options.patch):
        return _list(options)
    key = _key(options)
    from ..weights.apply import read_patch

    patch = _content(options.patch)
    with _naming(options.patch):
        contents, _ = read_patch(patch, key)
    base = (
        "holds everything"
        if contents.base is None
        else f"for version {contents.base:08x}, lists what is new or changed"
    )
    found = table("tensor", "dtype", "shape", "held as", "bytes", numbers=["bytes"], gap=2)
    for entry in contents.tensors:
        shape = " x ".join(map(str, entry.shape)) or "a number"
        held = "changes" if entry.from_base else "whole" if entry.of is None else f"the same as {entry.of}"
        if entry.offsets is not None:
            held += f", {' x '.join(map(str, entry.box.sizes))} from {', '.join(map(str, entry.offsets))} on"
        add_row(found, entry.name, entry.dtype, shape, held, f"{sum(entry.frames):,}")
    console = unbroken_console()
    ranks = "" if contents.ranks == 1 else f", rank {contents.rank} of {contents.ranks}"
    ranks += "" if contents.number is None else f", number {contents.number}"
    console.print(Text(f"{options.patch}: makes version {contents.version:08x}{ranks}, {base}"))
    console.print(found)


# ------------------------------------------------------------------ folders


def _publish(options: argparse.Namespace) -> None:
    key = _key(options)
    from ..weights.folders.publish import publish_version
    from ..weights.folders.verify import list_versions

    try:
        with _counting("reading and coding") as progress:
            publish_version(options.patch, options.new, options.base, options.whole_every, options.keep, progress, key)
    except NczError:
        raise
    except ValueError as error:
        raise ConfigError(f"--whole-every, --keep: {error}") from None
    newest = list_versions(options.patch, key)[-1]
    text = f"{options.patch}: version {newest.number}, {size(newest.stored_bytes)}"
    if newest.manifest.base is not None:
        whole = sum(row.bytes for row in newest.manifest.files.values())
        text += f", {whole / max(1, newest.stored_bytes):.1f} times fewer than its {size(whole)}"
    unbroken_console().print(Text(text))


def _fetch(options: argparse.Namespace) -> None:
    key = _key(options)
    from ..weights.folders.fetch import fetch_version

    if len(options.patch) > 1:
        raise UnsupportedError(f"{options.patch[0]} is a folder of versions: give it alone")
    with _counting("making") as progress:
        number = fetch_version(options.patch[0], options.new, options.version, options.base, progress, key)
    unbroken_console().print(Text(f"{options.new}: version {number}"))


def _list(options: argparse.Namespace) -> None:
    key = _key(options)
    from ..weights.folders.verify import list_versions

    found = table("version", "holds", "bytes", "of", "state", numbers=["version", "bytes", "of"], gap=2)
    versions = list_versions(options.patch, key)
    if not versions:
        raise MismatchError(f"{options.patch}: holds no version: `ncz patch make` adds one")
    for each in versions:
        manifest = each.manifest
        whole = 0 if manifest is None else sum(row.bytes for row in manifest.files.values())
        held = "" if manifest is None else "everything" if manifest.base is None else f"changes of {manifest.base}"
        add_row(found, str(each.number), held, f"{each.stored_bytes:,}", f"{whole:,}", each.problem or "complete")
    unbroken_console().print(found)


def _verify(options: argparse.Namespace) -> None:
    from ..weights.folders.verify import verify_versions

    with _counting("reading") as progress:
        numbers = verify_versions(options.folder, progress, _key(options))
    named = f"version {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} versions, {numbers[0]} to {numbers[-1]}"
    unbroken_console().print(Text(f"{options.folder}: {named}: every file is what its manifest says"))


@contextmanager
def _counting(title: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager that yields a function to call with bytes that are done and all bytes, and shows a bar."""
    with progress_bar() as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ------------------------------------------------------------------ reading and writing


def _read(file: str, is_replaced: bool = False) -> WeightFile:
    """Read a safetensors file, mapped into memory unless it is replaced. Errors name it."""
    from ..weights.files import mapped, read_file

    with _reading(file) as opened:
        data = opened.read() if is_replaced else mapped(opened)
    try:
        return read_file(data)
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from None


def _key(options: argparse.Namespace) -> bytes | None:
    """The key in --key-file."""
    if options.key_file is None:
        return None
    from ..weights.keys import read_key

    return read_key(_path(options.key_file), "--key-file")


def _content(file: str) -> bytes:
    """The bytes of a file, which stay as they are whatever happens to it: a key is compared with what is used."""
    with _reading(file) as opened:
        return opened.read()


@contextmanager
def _reading(file: str) -> Iterator[BinaryIO]:
    """Context manager that opens a file and turns OSError into an error that names it."""
    try:
        with open(_path(file), "rb") as opened:
            yield opened
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be read: {error.strerror or error}") from None


def _path(file: str) -> str:
    """`-` is standard input."""
    return "/dev/stdin" if file == "-" else file


def _is_same_file(source: str, target: str) -> bool:
    """Whether both are one file that is there."""
    try:
        return os.path.samefile(_path(source), target)
    except OSError:
        return False


@contextmanager
def _naming(patch: str) -> Iterator[None]:
    """Put the patch's file name in front of errors, and name --base where the base is the mistake."""
    try:
        yield
    except MismatchError as error:
        raise MismatchError(f"{patch}: {error} (--base names the version that it is for)") from None
    except PatchKeyError as error:
        raise PatchKeyError(f"{patch}: {error} (--key-file)") from None
    except (FrameError, UnsupportedError) as error:
        raise type(error)(f"{patch}: {error}") from None


@contextmanager
def _writing(file: str) -> Iterator[None]:
    """Context manager that turns OSError into an error that names the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be written: {error.strerror or error}") from None
