"""A line between two hosts that delays and loses frames, as a seed says: netem is not everywhere.

`bad_line.py relay ONE OTHER SEED DELAY LOSS` passes frames between two interfaces until it is
killed: each waits up to DELAY seconds and is lost with probability LOSS; order is kept.
`bad_line.py plain INTERFACE` makes the kernel fill in checksums and cut frames itself, which it
otherwise leaves to hardware that a relay is not. See hosts.py, which starts both.
"""

import collections
import fcntl
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 3
OUTGOING = 4  # a frame that this side sent itself
SIOCETHTOOL = 0x8946
SET_TX_CHECKSUMS = 0x17


def plain(interface):
    import ctypes

    value = ctypes.create_string_buffer(struct.pack("II", SET_TX_CHECKSUMS, 0))
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCETHTOOL, request)


class Direction:
    def __init__(self, source, target, seed, delay, loss):
        self.source, self.target, self.delay, self.loss = source, target, delay, loss
        self.random = random.Random(seed)
        self.waiting = collections.deque()  # (when, frame), in order

    def take(self):
        frame, address = self.source.recvfrom(1 << 16)
        if address[2] == OUTGOING or self.random.random() < self.loss:
            return
        when = time.monotonic() + self.random.random() * self.delay
        if self.waiting:
            when = max(when, self.waiting[-1][0])
        self.waiting.append((when, frame))

    def release(self):
        """Sends what is due; returns when the next frame is, or None."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            self.target.send(self.waiting.popleft()[1])
        return self.waiting[0][0] if self.waiting else None


def relay(one, other, seed, delay, loss):
    ends = []
    for interface in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        end.bind((interface, 0))
        ends.append(end)
    ways = [Direction(ends[0], ends[1], f"{seed} there", delay, loss),
            Direction(ends[1], ends[0], f"{seed} back", delay, loss)]
    print("ready", flush=True)
    while True:
        due = [when for when in (way.release() for way in ways) if when is not None]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, [], [], wait)[0]:
            ways[ends.index(end)].take()


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2])
    else:
        relay(*sys.argv[2:5], *map(float, sys.argv[5:7]))
