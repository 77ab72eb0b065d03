"""A Slurm cluster whose nodes are the network namespaces of hosts.py: slurmctld, a slurmd for each, munged.

`with Hosts(2) as hosts, Slurm(hosts, folder) as slurm:` starts them and ends all of them. Nodes are named n1, n2 ...,
names that the nodes alone know. Needs root and slurm-wlm.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "squeue", "sinfo")


def why_not():
    """Why none can be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs slurm-wlm of Debian: {' and '.join(missing)} not found"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "needs slurm-wlm of Debian, and control groups on /sys/fs/cgroup for its slurmd"
    return None


def name_of(host):
    return f"n{host + 1}"


class Slurm:
    def __init__(self, hosts, folder):
        self.hosts = hosts
        # Sockets have short paths, and munged wants them in nobody's reach.
        self.folder = Path(folder)
        self.running = []

    def __enter__(self):
        try:
            self.start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_all(self):
        for name in ("state", "munge"):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name).chmod(0o711)
        self.write_names()
        self.write_configuration()
        munge = self.folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        self.run_beside(0, "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
                        f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")
        self.run_beside(0, "slurmctld", "-D")
        for host in range(self.hosts.count):
            self.run_beside(host, "slurmd", "-D", "-N", name_of(host))
        deadline = time.monotonic() + 60
        while self("sinfo", "--noheader", "--format=%D %t", check=False).stdout != f"{self.hosts.count} idle\n":
            dead = [process.args for process in self.running if process.poll() is not None]
            assert not dead and time.monotonic() < deadline, (dead, (self.folder / "log").read_text()[-3000:])
            time.sleep(0.1)

    def write_names(self):
        lines = ["127.0.0.1 localhost", f"{self.hosts.address(0)} {socket.gethostname()}"]
        lines += [f"{self.hosts.address(host)} {name_of(host)}" for host in range(self.hosts.count)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def write_configuration(self):
        own = socket.gethostname().split(".")[0]
        nodes = [f"NodeName={name_of(host)} NodeHostname={own} NodeAddr={self.hosts.address(host)} Port={17001 + host} "
                 "CPUs=4 State=UNKNOWN" for host in range(self.hosts.count)]
        self.configuration = self.folder / "slurm.conf"
        self.configuration.write_text("\n".join([
            "ClusterName=test", f"SlurmctldHost={own}({self.hosts.address(0)})", "SlurmUser=root",
            f"AuthInfo=socket={self.folder}/munge/socket", f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool-%n", f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "SlurmdParameters=config_overrides", "ReturnToService=2", "KillWait=30", *nodes, "PartitionName=main Nodes=ALL Default=YES State=UP", ""]))

    def start(self, host, command, **options):
        """On a node: with its network, and the names; `ip netns exec` would hide control groups from slurmd."""
        inside = ["nsenter", f"--net=/run/netns/{self.hosts.name(f'host{host}')}", "unshare", "--mount", "sh", "-c",
                  'mount --bind "$0" /etc/hosts && exec "$@"', self.folder / "hosts", *command]
        return subprocess.Popen(list(map(str, inside)), env={**os.environ, "SLURM_CONF": str(self.configuration)},
                                **options)

    def run_beside(self, host, *command):
        with (self.folder / "log").open("a") as log:
            self.running.append(self.start(host, command, stdout=log, stderr=log))

    def __call__(self, *command, check=True):
        """Runs a command on the first node."""
        process = self.start(0, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = process.communicate(timeout=120)
        assert not check or process.returncode == 0, (command, out, errors)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def __exit__(self, *_):
        for process in reversed(self.running):
            process.terminate()
        for process in reversed(self.running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            process.wait()
