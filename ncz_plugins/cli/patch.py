"""`ncz patch`: turn safetensors files into patches and back."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import TYPE_CHECKING

from rich.text import Text

from ..core.errors import FrameError, MismatchError, UnsupportedError
from ..core.whole_files import write_whole
from .output import add_row, list_commands, size, table, unbroken_console

if TYPE_CHECKING:
    from ..weights.files import WeightFile


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser("patch", help="turn versions of weights (.safetensors) into patches, and back")
    list_commands(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    make = actions.add_parser("make", help="write what has changed between two files, or all of one")
    make.add_argument("new", help="the new version, .safetensors")
    make.add_argument("patch", help="the file to write; - is standard output")
    make.add_argument(
        "--base",
        metavar="OLD",
        help="the version that the receiver has, .safetensors; without it the patch holds a whole version",
    )
    make.set_defaults(run=_make, outputs={"patch": "patch"})
    apply = actions.add_parser("apply", help="write the new version, to the bit")
    apply.add_argument("patch", nargs="+", help="what `ncz patch make` wrote; the patches of all ranks, if several")
    apply.add_argument("new", help="the file to write, .safetensors; - is standard output")
    apply.add_argument("--base", metavar="OLD", help="the version that the patch is for, .safetensors")
    apply.set_defaults(run=_apply, outputs={"new": "new"})
    show = actions.add_parser("show", help="list what is in a patch")
    show.add_argument("patch", help="what `ncz patch make` wrote")
    show.set_defaults(run=_show)


def _make(options: argparse.Namespace) -> None:
    from ..weights.files import make_file_patch

    new = _read(options.new)
    patch = make_file_patch(new, None if options.base is None else _read(options.base))
    with _writing(options.patch):
        write_whole(options.patch, patch)
    whole = sum(form.total_bytes for form in new.forms.values())
    fewer = f", {whole / len(patch):.1f} times fewer than its {size(whole)}"
    unbroken_console().print(Text(f"{options.patch}: {size(len(patch))}{fewer}"))


def _apply(options: argparse.Namespace) -> None:
    from ..weights.apply import read_patches
    from ..weights.files import FileBytes, apply_file_patch, require_base_file

    base, patches = None if options.base is None else _read(options.base), [_mapped(each) for each in options.patch]
    with _writing(options.new), _naming(", ".join(options.patch)):
        version = read_patches(patches)
        require_base_file(version, base)
        made = apply_file_patch(version, base)
        write_whole(options.new, FileBytes(made))
    unbroken_console().print(Text(f"{options.new}: {len(made.forms)} tensors"))


def _show(options: argparse.Namespace) -> None:
    from ..weights.apply import read_patch

    patch = _mapped(options.patch)
    with _naming(options.patch):
        contents, _ = read_patch(patch)
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
    console.print(Text(f"{options.patch}: makes version {contents.version:08x}{ranks}, {base}"))
    console.print(found)


def _read(file: str) -> WeightFile:
    """Read a safetensors file. Errors name it."""
    from ..weights.files import read_file

    data = _mapped(file)
    try:
        return read_file(data)
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from None


def _mapped(file: str) -> mmap | bytes:
    """The bytes of a file; `-` is standard input."""
    from ..weights.files import mapped

    try:
        with open("/dev/stdin" if file == "-" else file, "rb") as opened:
            return mapped(opened)
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _naming(patch: str) -> Iterator[None]:
    """Put the patch's file name in front of errors, and name --base where the base is the mistake."""
    try:
        yield
    except MismatchError as error:
        raise MismatchError(f"{patch}: {error} (--base names the version that it is for)") from None
    except (FrameError, UnsupportedError) as error:
        raise type(error)(f"{patch}: {error}") from None


@contextmanager
def _writing(file: str) -> Iterator[None]:
    """Context manager that turns OSError into an error that names the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be written: {error.strerror or error}") from None
