"""Keyed checksums of patches: whoever lacks the key can't make or change a patch that a reader with the key accepts."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from ..core.errors import PatchKeyError, UnsupportedError
from .head import FORMAT_WITH_TAG, format_of

TAG_BYTES = 32  # HMAC-SHA256, at the end of the patch

_LEAST_KEY_BYTES = 16


def require_key(key: bytes | None) -> None:
    """Raise PatchKeyError unless this can be a key, or is None."""
    if key is not None and (not isinstance(key, bytes) or len(key) < _LEAST_KEY_BYTES):
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise PatchKeyError(
            f"key must be {_LEAST_KEY_BYTES} bytes or more, got {got}: take random ones: secrets.token_bytes(32)"
        )


def read_key(path: str | None, setting: str = "key_file") -> bytes | None:
    """The key in a file, which is all of its bytes; None without a file. Errors name the setting that named it.

    Raises UnsupportedError if the file can't be read, and PatchKeyError if it holds fewer than 16 bytes.
    """
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            key = file.read()
        require_key(key)
    except OSError as error:
        why = error.strerror or error
        raise UnsupportedError(f"{setting}: {path!r} cannot be read: {why}: name a file with the key") from None
    except PatchKeyError as error:
        raise PatchKeyError(f"{setting}: {path!r}: {error}") from None
    return key


def tag_of(parts: Iterable[bytes | memoryview], key: bytes) -> bytes:
    """The keyed checksum of bytes in a row."""
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        code.update(part)
    return code.digest()


def without_tag(patch: memoryview, key: bytes | None) -> memoryview:
    """The patch up to its keyed checksum, after that was compared. Nothing else of the patch has been believed so far.

    Raises PatchKeyError unless the patch has a keyed checksum of this key; if the key is None, unless it has none.
    """
    require_key(key)
    has_tag = format_of(patch) == FORMAT_WITH_TAG
    if has_tag and key is None:
        raise PatchKeyError("the patch has a keyed checksum, and no key was given: pass the publisher's key")
    if key is not None and not has_tag:
        raise PatchKeyError(
            "a key was given, and the patch has no keyed checksum: publish with the same key, or pass no key if nobody "
            "else can write where the patch comes from"
        )
    if key is None:
        return patch
    body, tag = patch[:-TAG_BYTES], patch[-TAG_BYTES:]
    if not hmac.compare_digest(tag_of([body], key), bytes(tag)):
        raise PatchKeyError(
            "the keyed checksum of the patch is not that of this key: the patch was changed on its way, or made with "
            "another key; get it again, or pass the publisher's key"
        )
    return body
