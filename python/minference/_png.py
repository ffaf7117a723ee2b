"""PNG files of pictures with few colours, by Python's own zlib."""

import struct
import zlib


def encode(width: int, height: int, palette: bytes, pixels: bytes) -> bytes:
    """The bytes of a PNG file.

    palette: 3 bytes (red, green, blue) for each of at most 256 colours; pixels: [height][width] indices
    into it.
    """
    rows = b"".join(b"\0" + pixels[y * width : (y + 1) * width] for y in range(height))  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, indices into a palette
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
