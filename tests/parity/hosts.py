"""Hosts that are network namespaces of this machine, with slow links between them.

`with Hosts(2, rate="200mbit") as hosts:` makes two, on one switch, each with its own address, and
removes them however the block ends. Names begin with this process's number; what a killed process
left is removed by the next one. Needs root, iproute2 (ip, tc).
`line=(seed, delay, loss)` puts a bad line (bad_line.py) between two hosts in the switch's place.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

PREFIX = "tessera"
FILES = "/etc/netns"
BAD_LINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bad_line.py")


def ip(*arguments, check=True, tool="ip"):
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"{tool} {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done


def why_not():
    """Why namespaces cannot be made here, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs ip and tc of iproute2: {' and '.join(missing)} not found"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    done = ip("netns", "add", probe, check=False)
    if done.returncode != 0:
        return f"needs network namespaces: {done.stderr.strip()}"
    ip("netns", "del", probe)
    return None


def remove(name):
    for pid in ip("netns", "pids", name, check=False).stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    ip("netns", "del", name, check=False)


def is_left_over(name):
    of = re.match(rf"{PREFIX}-(\d+)-\w+", name)
    return of is not None and not os.path.exists(f"/proc/{of[1]}")


def remove_left_over():
    for line in ip("netns", "list").stdout.splitlines():
        if is_left_over(line):
            remove(line.split()[0])
    # What a test said of a host's names.
    for name in filter(is_left_over, os.listdir(FILES) if os.path.isdir(FILES) else []):
        shutil.rmtree(os.path.join(FILES, name), ignore_errors=True)


class Hosts:
    def __init__(self, count, rate=None, line=None):
        assert line is None or count == 2, "a line has two ends"
        self.count = count
        self.rate = rate
        self.line = line
        self.relay = None
        self.switch = self.name("switch")

    @staticmethod
    def name(what):
        return f"{PREFIX}-{os.getpid()}-{what}"

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def __enter__(self):
        remove_left_over()
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
            for host in range(self.count):
                self.add(host)
            if self.line:
                self.start_line()
        except BaseException:
            self.__exit__()
            raise
        return self

    def add(self, host):
        name, port = self.name(f"host{host}"), f"port{host}"
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.switch)
        ip("-n", self.switch, "link", "set", port, *([] if self.line else ["master", "switch"]), "up")
        ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", name, "link", "set", link, "up")
        if self.rate:
            self.set_rate(host, self.rate)

    def set_rate(self, host, rate):
        """Of what leaves the host."""
        ip("-n", self.name(f"host{host}"), "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst",
           "128kb", "latency", "500ms", tool="tc")

    def start_line(self):
        for host in range(self.count):
            ip("netns", "exec", self.name(f"host{host}"), sys.executable, BAD_LINE, "plain", "eth0")
        self.relay = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, sys.executable, BAD_LINE, "relay", "port0", "port1",
             *map(str, self.line)], stdout=subprocess.PIPE, text=True)
        if self.relay.stdout.readline() != "ready\n":
            raise RuntimeError("the line between the hosts did not start")

    def __exit__(self, *_):
        remove(self.switch)
        for host in range(self.count):
            remove(self.name(f"host{host}"))
        if self.relay:
            self.relay.wait()
            self.relay.stdout.close()

    def start(self, host, command, environment, **options):
        return subprocess.Popen(["ip", "netns", "exec", self.name(f"host{host}"), *map(str, command)],
                                env={**os.environ, **environment}, **options)

    def sent(self, host):
        """Bytes that went out over the link of a host."""
        link = json.loads(ip("-n", self.name(f"host{host}"), "-s", "-j", "link", "show", "eth0").stdout)[0]
        return link["stats64"]["tx"]["bytes"]

    def cut(self, host):
        """From now on nothing comes to a host or from it, and nobody is told."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")


def places(per_host, port=29500, master=Hosts.address(0)):
    """The host of each rank and its variables, as torchrun sets them; `per_host`: ranks of each."""
    world, ranks = sum(per_host), []
    for host, count in enumerate(per_host):
        for local in range(count):
            ranks.append((host, {
                "RANK": str(len(ranks)), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(host), "MASTER_ADDR": master,
                "MASTER_PORT": str(port)}))
    return ranks


def start_ranks(hosts, program, per_host, *arguments):
    """Starts `tessera train` on all hosts."""
    return [hosts.start(host, [program, "train", *arguments], variables, stderr=subprocess.PIPE, text=True)
            for host, variables in places(per_host)]


def end_of(ranks, timeout=300):
    """The exit code and the last words of each rank; ends those that are late."""
    ends = []
    try:
        for rank in ranks:
            errors = rank.communicate(timeout=timeout)[1]
            ends.append((rank.returncode, errors))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return ends
