"""A TCP proxy whose delays and losses follow from a seed.

Each piece that goes through waits up to `delay` seconds; with probability `loss` it was lost and
comes as TCP would send it again, `again` seconds later. After `cut_after` bytes all connections are
closed and no new ones are taken.
"""

import random
import socket
import threading
import time


class Proxy:
    def __init__(self, target, seed=1, delay=0.0, loss=0.0, again=0.2, cut_after=None):
        self.target, self.delay, self.loss, self.again = target, delay, loss, again
        self.cut_after, self.passed, self.lost = cut_after, 0, 0
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.sockets = []
        self.threads = []
        self.closed = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.spawn(self.accept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        for thread in self.threads:
            thread.join()

    def spawn(self, function, *arguments):
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()

    def close(self):
        with self.lock:
            self.closed = True
            ends, self.sockets = [self.listener, *self.sockets], []
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def reach(self):
        """The target, which may come later than whoever asks for it."""
        while not self.closed:
            try:
                return socket.create_connection(self.target)
            except OSError:
                time.sleep(0.02)
        return None

    def accept(self):
        while True:
            try:
                one = self.listener.accept()[0]
            except OSError:
                return
            self.spawn(self.connect, one)

    def connect(self, one):
        other = self.reach()
        with self.lock:
            if self.closed or other is None:
                one.close()
                return
            self.sockets += [one, other]
        for end in (one, other):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.spawn(self.pump, one, other)
        self.spawn(self.pump, other, one)

    def wait_of(self, size):
        """How long the next piece takes; None when the connection is to be cut."""
        with self.lock:
            self.passed += size
            if self.cut_after is not None and self.passed > self.cut_after:
                return None
            is_lost = self.random.random() < self.loss
            self.lost += is_lost
            return self.random.random() * self.delay + (self.again if is_lost else 0)

    def pump(self, source, target):
        try:
            while piece := source.recv(1 << 16):
                wait = self.wait_of(len(piece))
                if wait is None:
                    return self.close()
                time.sleep(wait)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass
