"""A Zstandard frame without compression (RFC 8878, 3.1.1): no package for it is needed."""

import struct


def raw(text):
    content = text.encode()
    assert len(content) < 1 << 17
    header = struct.pack("<IB", 0xFD2FB528, 0b1010_0000) + struct.pack("<I", len(content))  # one segment, its size
    return header + struct.pack("<I", 1 | len(content) << 3)[:3] + content  # the last block, raw
