"""Pictures that mean harm, or were harmed."""

from __future__ import annotations

import struct
import zlib


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def bomb() -> bytes:
    """A PNG of 90000 x 90000 pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 90_000, 90_000, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
