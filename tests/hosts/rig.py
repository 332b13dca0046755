"""Hosts to run on, all on this machine: namespaces of network, processes, mounts and names, each with its own sshd.

    this process ── nbtN ──┐
                           switch          the far ends of all cables, in a namespace that has nothing else
    gpu1 ── eth0 ──────────┤
    gpu2 ── eth0 ──────────┘

Each host's first process waits for the end of its stdin, which this process holds. So all of it goes with this
process, however that ends: the kernel of the machine kills a namespace's processes with its first one, and a
namespace takes its cables, mounts and files with it.

The hosts are as awkward as real ones: each has its own /tmp and /home and a user with a name of its own, and one folder
is the same on all, as by NFS. Their own name resolves to 127.0.1.1 as on Debian, all of them have a docker0 with the
same address, their shell greets each login, their process ids and monotonic clocks mean nothing here.

By root, ``python -m tests.hosts.rig jupyter lab`` is a notebook whose ``ssh gpu1`` works; the hosts share its folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
NAMES = ("gpu1", "gpu2", "gpu3", "gpu4")
_IN_SLURM = 3  # of them
_USERS = ("ada", "bob", "eve")
_OWN = ("/tmp", "/home")  # of each host
_TOOLS = ("ip", "ss", "tc", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "mount")
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_UPTIMES_S = (4_000_000, 1_000, 77)  # what the hosts' clocks are ahead of ours
GONE_S = 10.0  # what should be gone at once, on a machine with other work; less than the heartbeat
_START_S = 10.0
_GREETING = 'echo "Welcome to $(hostname)!"; echo "You have new mail." >&2\n'

# The first process of a host. What it mounts, nobody else sees.
_FIRST = """
set -eu
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -p -m 755 /run/sshd
{own}
mkdir -p {home}
cp {folder}/bashrc {home}/.bashrc
mount --bind {folder}/{name}.hosts /etc/hosts
mount --bind {folder}/{name}.passwd /etc/passwd
hostname {name}
ip link set lo up
echo ready
while read -r go; do
  {sshd} -D -e -f {folder}/{name}.sshd 2>>{folder}/{name}.log &
done
"""

_SSHD = """
ListenAddress {address}:22
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/{name}.authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
UseDNS no
PrintMotd no
SetEnv PYTHONPATH={pythonpath} {environ}
"""

_SSH = """
Host {name} {name}.by-another-name
  HostName {address}
  User {user}

"""
_SSH_ALL = """
Host *
  IdentityFile {folder}/client.key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


_SALLOC = """
trap 'echo cancelled >> {folder}/asked; exit 1' TERM
echo "$*" >> {folder}/asked
echo "salloc: Pending job allocation 4711" >&2
until [ -e {folder}/granted ]; do sleep 0.05; done
if [ -s {folder}/granted ]; then cat {folder}/granted >&2; exit 1; fi
echo "salloc: Granted job allocation 4711" >&2
while [ "${{1#--}}" != "$1" ]; do shift; done
SLURM_JOB_ID=4711 SLURM_JOB_NODELIST="gpu[1-3]" "$@"
echo released >> {folder}/asked
"""
_KUBECTL = """
[ "$1 $2 $4" = "exec -i --" ] || {{ echo "error: unknown command" >&2; exit 1; }}
pod="$3"
shift 4
case "$pod" in
{enter}
  *) echo "Error from server (NotFound): pods \"$pod\" not found" >&2; exit 1;;
esac
exec "$@"
"""
_SRUN = """
while [ $# -gt 0 ]; do
  case "$1" in
    --nodelist=*) node=${{1#--nodelist=}};;
    --*) ;;
    *) break;;
  esac
  shift
done
case "$node" in
{enter}
  *) echo "srun: error: Unable to create step: Requested node configuration is not available" >&2; exit 1;;
esac
exec "$@"
"""


class NotHere(Exception):
    """This machine has not what the rig needs; the text says what."""


@dataclass
class Machine:
    """A network namespace with processes in it.

    Attributes:
        name: as ssh knows it.
        address: on the network that all share.
        home: of its user.
        shared: the folder that is the same on all hosts.
    """

    name: str
    address: str
    folder: Path
    home: str
    shared: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    pid: int = 0  # of its first process, as seen from here

    def run(self, *command: str, timeout_s: float = 30.0, check: bool = True) -> str:
        """A command there, as root; what it printed."""
        done = subprocess.run(self.enter(*command), capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"{self.name}: {command}: {done.stderr}"
        return done.stdout

    def enter(self, *command: str) -> list[str]:
        """The command line that runs another one there."""
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        spaces += ["--time"] if os.path.exists("/proc/self/ns/time") else []
        return ["nsenter", "--target", str(self.pid), *spaces, "--", *command]

    @cached_property
    def _space(self) -> str:
        return os.readlink(f"/proc/{self.pid}/ns/pid")

    def processes(self) -> list[psutil.Process]:
        """All that run there, as seen from here, but what makes the host."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == self._space and not self._is_its_own(process):
                    found.append(process)
        return found

    def _is_its_own(self, process: psutil.Process) -> bool:
        return process.pid == self.pid or (process.ppid() == self.pid and process.name() == "sshd")

    def agent(self) -> psutil.Process:
        """The process between kernel and ranks there."""
        found = [process for process in self.processes() if _says(process, "nbddp.agent") and not _is_shell(process)]
        return min(found, key=lambda process: process.pid)

    def ranks(self) -> list[psutil.Process]:
        """Its ranks: the children of the fork server."""
        servers = [process for process in self.processes() if _says(process, "the fork server of nbddp")]
        pids = {process.pid for process in servers}
        return [process for process in servers if process.ppid() in pids]

    def start_sshd(self) -> None:
        """Start its ssh server."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def power_off(self) -> None:
        """Kill all of it but the process that makes the host, its ssh server included, and empty its /tmp."""
        for process in [each for each in psutil.process_iter() if each.pid != self.pid]:
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == self._space:
                    process.kill()
        _wait_for(lambda: not self.processes())
        self.clean_up((), ())

    def power_on(self) -> list[int]:
        """Start its ssh server if it has none, and wait until it answers; returns the pid, as seen from here."""
        if not self._sshd():
            self.start_sshd()
        _wait_for_port(self.address)
        return self._sshd()

    def _sshd(self) -> list[int]:
        return [process.pid for process in psutil.Process(self.pid).children() if is_sshd(process)]

    def listening(self) -> set[tuple[str, str]]:
        """Address and program of every TCP port there that somebody listens on."""
        found = set()
        for line in self.run("ss", "-Hltnp").splitlines():
            words = line.split()
            program = words[5].split('"')[1] if len(words) > 5 else "?"
            found.add((words[3].rpartition(":")[0].split("%")[0], program))
        return found

    def files(self) -> set[str]:
        """What lies in its folder for temporary files and in its shared memory, but torch's own caches."""
        root = Path(f"/proc/{self.pid}/root")
        found: set[str] = set()
        bound = {self.folder, *_kept(self.shared)}
        above = {str(folder.relative_to("/")) for path in bound for folder in path.parents}
        for top in ("tmp", "dev/shm"):
            for folder, folders, files in os.walk(root / top):
                inside = Path("/") / Path(folder).relative_to(root)
                folders[:] = [n for n in folders if not n.startswith("torchinductor_") and inside / n not in bound]
                found |= {str((Path(folder) / name).relative_to(root)) for name in [*folders, *files]} - above
        return found

    def wait_until_clean(
        self,
        timeout_s: float = GONE_S,
        pids: Collection[int] = (),
        files: Collection[str] = (),
    ) -> float:
        """Wait until nothing is left there but these, and the ssh server's own; returns how long that took."""
        began = time.monotonic()
        while left := [*self._processes_of_ours(pids), *self._files_besides(files)]:
            if time.monotonic() - began > timeout_s:
                told = [_told(one) for one in left]
                raise AssertionError(f"{self.name}: still there after {timeout_s} s: {told}")
            time.sleep(0.01)
        return time.monotonic() - began

    def clean_up(self, pids: Collection[int], files: Collection[str]) -> None:
        """Remove all but these, so that the next test does not suffer from what this one has left."""
        for process in self._processes_of_ours(pids):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for name in sorted(self._files_besides(files), reverse=True):  # what lies in a folder before the folder
            path = Path(f"/proc/{self.pid}/root") / name
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    def _files_besides(self, files: Collection[str]) -> set[str]:
        """Without sockets of DataLoader workers in the folder of a session that goes on: they end with it."""
        more = self.files() - set(files)
        return {name for name in more if not (os.path.dirname(name) in files and "/listener-" in name)}

    def _processes_of_ours(self, pids: Collection[int]) -> list[psutil.Process]:
        # With its cable pulled, a server does not hear of its client's end.
        return [p for p in self.processes() if p.pid not in pids and not is_sshd(p)]


class Rig(contextlib.AbstractContextManager["Rig"]):
    """All hosts, and what a client needs to log in to them."""

    def __init__(self, shared: Path, names: Sequence[str] = NAMES) -> None:
        """
        Args:
            shared: the folder that is the same here and on all hosts.
        """
        _look_around()
        self.folder = Path(tempfile.mkdtemp(prefix="rig-"))
        self.shared = shared.resolve()
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._client = ""
        self._pulled: set[str] = set()
        with contextlib.ExitStack() as unless_up:
            unless_up.callback(self.close)
            self._net = _free_network()
            self._make_keys(names)
            self._switch = self._start_switch()
            self.hosts = {name: self._start_host(i, name, f"{self._net}.{i + 1}") for i, name in enumerate(names)}
            self._plug_in_this_process()
            (self.folder / "config").write_text(
                "".join(
                    _SSH.format(name=h.name, address=h.address, user=Path(h.home).name) for h in self.hosts.values()
                )
                + f"Host nobody-there\n  HostName {self._net}.200\n\n"
                + f"Host no-server\n  HostName {self._net}.1\n  Port 9\n\n"
                + _SSH_ALL.format(folder=self.folder)
            )
            for host in self.hosts.values():
                _wait_for_port(host.address)
            unless_up.pop_all()

    # ------------------------------------------------------------------ for the tests

    @property
    def ssh(self) -> list[str]:
        """The launcher for ``nbddp.cluster``."""
        return ["ssh", "-F", str(self.folder / "config"), "-T", "-o", "BatchMode=yes", "{host}"]

    def cable(self, name: str, state: str) -> None:
        """Pull a host's cable out of the switch (``down``), or put it in again (``up``)."""
        _ip(self._switch, "link", "set", name, state)
        if state == "down":
            self._pulled.add(name)
        elif name in self._pulled:
            self._pulled.remove(name)
            for process in self.hosts[name].processes():
                if is_sshd(process):
                    process.kill()  # a session whose client has gone meanwhile

    def limit(self, name: str, rate: str = "") -> None:
        """Let so much per second pass through a cable in each direction: ``10mbit``; "": all of it.

        Args:
            name: of a host, or ``"notebook"`` for this process's own cable.
        """
        end = (os.getpid(), self._client) if name == "notebook" else (self.hosts[name].pid, "eth0")
        for pid, device in ((self._switch, name), end):
            there = ["nsenter", "--target", str(pid), "--net", "--", "tc", "qdisc"]
            _quietly(*there, "del", "dev", device, "root", check=False)
            if rate:
                _quietly(*there, "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")

    def isolate(self, *names: str, state: str = "on") -> None:
        """Let these hosts reach this process and not each other, as a firewall between machines does; or ``"off"``."""
        for name in names:
            _ip(self._switch, "link", "set", name, "type", "bridge_slave", "isolated", state)

    @contextlib.contextmanager
    def dead_dns(self) -> Iterator[None]:
        """Give all hosts a DNS server that never answers."""
        files = {"resolv.conf": f"nameserver {self._net}.100\n", "nsswitch.conf": "hosts: files dns\n"}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent, contextlib.ExitStack() as stack:
            silent.bind((f"{self._net}.100", 53))
            for name, text in files.items():
                (self.folder / name).write_text(text)
                for host in self.hosts.values():
                    host.run("mount", "--bind", str(self.folder / name), f"/etc/{name}")
                    stack.callback(host.run, "umount", f"/etc/{name}")
            yield

    def passed(self, name: str) -> tuple[int, int]:
        """Bytes that have gone through the cable of a host, or of ``"notebook"``, so far: to it, and from it."""
        pid, device = ("self", self._client) if name == "notebook" else (self.hosts[name].pid, "eth0")
        statistics = Path(f"/proc/{pid}/net/dev").read_text()
        words = next(line.split(":")[1].split() for line in statistics.splitlines() if line.strip().startswith(device))
        return int(words[0]), int(words[8])

    def plain_ssh(self) -> str:
        """A folder for the front of PATH, with an ``ssh`` to which the user's own ~/.ssh/config names the hosts.

        OpenSSH takes no notice of $HOME, but of the home that stands in /etc/passwd: so it gets one of its own.
        """
        home, folder = self.folder / "home", self.folder / "bin"
        if not folder.exists():
            (home / ".ssh").mkdir(parents=True, mode=0o700)
            shutil.copy(self.folder / "config", home / ".ssh" / "config")
            entries = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
            moved = [entry[:5] + [str(home)] + entry[6:] if entry[2:3] == ["0"] else entry for entry in entries]
            (self.folder / "passwd").write_text("".join(":".join(entry) + "\n" for entry in moved))
            mount = f"mount --bind {self.folder / 'passwd'} /etc/passwd"
            ssh = shutil.which("ssh", path=_path())
            _write_program(folder / "ssh", f'exec unshare --mount sh -c \'{mount} && exec {ssh} "$@"\' ssh "$@"')
        return str(folder)

    def slurm(self) -> str:
        """A folder for the front of PATH, with the ``srun`` of an allocation of three hosts, and with ``kubectl``.

        ``salloc`` grants it when there is an empty file ``granted``, and refuses it with the text that stands there.
        """
        folder = self.folder / "slurm"
        if not folder.exists():
            enter = "\n".join(f'  {h.name}) set -- {shlex.join(h.enter())} "$@";;' for h in self.hosts.values())
            _write_program(folder / "srun", _SRUN.format(enter=enter))
            _write_program(folder / "kubectl", _KUBECTL.format(enter=enter))
            _write_program(folder / "salloc", _SALLOC.format(folder=folder))
            names = "\\n".join(list(self.hosts)[:_IN_SLURM])
            _write_program(folder / "scontrol", f'[ "$*" = "show hostnames gpu[1-3]" ] && printf "{names}\\n"')
        return str(folder)

    def wait_until_clean(self, *names: str) -> None:
        """Wait until nothing is left on these hosts, or on any."""
        for name in names or self.hosts:
            self.hosts[name].wait_until_clean()

    def close(self) -> None:
        """Everything goes: the namespaces with their first processes, the cables with the namespaces."""
        self._stack.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------ building it

    def _make_keys(self, names: Sequence[str]) -> None:
        for name in ("client", *names):
            _quietly("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / f"{name}.key"))
        (self.folder / "bashrc").write_text(_GREETING)
        known = []
        for i, name in enumerate(names):
            shutil.copy(self.folder / "client.key.pub", self.folder / f"{name}.authorized")
            known.append(f"{self._net}.{i + 1} {(self.folder / f'{name}.key.pub').read_text()}")
        (self.folder / "known_hosts").write_text("".join(known))

    def _start_switch(self) -> int:
        process = self._hold(["unshare", "--net", "cat"])
        _wait_for(lambda: os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        _ip(process.pid, "link", "add", "switch", "type", "bridge")
        _ip(process.pid, "link", "set", "switch", "up")
        return process.pid

    def _start_host(self, number: int, name: str, address: str) -> Machine:
        user = _USERS[number % len(_USERS)]
        home = f"/home/{user}"
        (self.folder / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        # Its number is root's: in the shared folder it is the notebook's user, as on hosts with one list of users.
        others = Path("/etc/passwd").read_text()
        (self.folder / f"{name}.passwd").write_text(f"{user}:x:0:0::{home}:/bin/bash\n{others}")
        (self.folder / f"{name}.sshd").write_text(
            _SSHD.format(folder=self.folder, name=name, address=address, pythonpath=ROOT, environ=_environ())
        )
        sshd = shutil.which("sshd", path=_path())
        first = _FIRST.format(folder=self.folder, name=name, sshd=sshd, own=self._own_folders(), home=home)
        clock = _clock(_UPTIMES_S[number % len(_UPTIMES_S)])
        process = self._hold([*_UNSHARE, *clock, "bash", "-c", first], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            if process.stdout.readline() != b"ready\n":
                raise NotHere(f"this machine does not allow namespaces with mounts of their own ({name})")
        pid = psutil.Process(process.pid).children()[0].pid
        host = Machine(name, address, self.folder, home, self.shared, process, pid)
        _ip(0, "link", "add", "eth0", "netns", str(host.pid), "type", "veth", "peer", name, "netns", str(self._switch))
        _ip(self._switch, "link", "set", name, "master", "switch", "up")
        _ip(host.pid, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip(host.pid, "link", "set", "eth0", "up")
        _give_docker0(host.pid)
        host.start_sshd()
        return host

    def _own_folders(self) -> str:
        """The shell's lines that give a host its own folders; what it needs of those that they hide is bound again."""
        lines = []
        bound = [folder for folder in (self.folder, *_kept(self.shared)) if str(folder).startswith(_OWN)]
        for i, folder in enumerate(bound):
            lines += [f"mkdir -p /run/kept/{i}", f"mount --bind {folder} /run/kept/{i}"]
        lines += [f"mount -t tmpfs -o mode=1777 tmpfs {own}" for own in _OWN]
        for i, folder in enumerate(bound):
            lines += [f"mkdir -p {folder}", f"mount --move /run/kept/{i} {folder}"]
        return "\n".join(lines)

    def _plug_in_this_process(self) -> None:
        self._client = f"nbt{self._net.split('.')[2]}"
        _ip(0, "link", "add", self._client, "type", "veth", "peer", "notebook", "netns", str(self._switch))
        self._stack.callback(_ip, 0, "link", "del", self._client, check=False)
        _ip(self._switch, "link", "set", "notebook", "master", "switch", "up")
        _ip(0, "addr", "add", f"{self._net}.100/24", "dev", self._client)
        _ip(0, "link", "set", self._client, "up")

    def _hold(self, command: list[str], **options: int) -> subprocess.Popen[bytes]:
        """Start what lives until its stdin ends."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **options)  # type: ignore[call-overload]
        self._stack.callback(_end, process)
        return process


def _kept(shared: Path) -> list[Path]:
    """What all hosts have in common: the shared folder, this package and Python."""
    return [shared, ROOT, Path(sys.prefix), Path(sys.base_prefix)]


def _write_program(path: Path, body: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def _look_around() -> None:
    if sys.platform != "linux":
        raise NotHere("hosts that are namespaces need Linux")
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        raise NotHere(
            f"{', '.join(missing)} not found (Debian: apt-get install openssh-server openssh-client iproute2)"
        )
    if os.geteuid() != 0:
        raise NotHere("namespaces with an sshd each need root")
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)
    if tried.returncode:
        raise NotHere(f"this machine does not allow namespaces: {tried.stderr.strip()}")
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "switch", "type", "bridge"], capture_output=True, text=True
    )
    if tried.returncode:
        raise NotHere(f"this machine's kernel has no bridges: {tried.stderr.strip()}")


def _clock(ahead_s: int) -> list[str]:
    """The rest of an ``unshare``: a monotonic clock of its own, where this machine's kernel has such."""
    words = ["--time", "--monotonic", str(ahead_s), "--boottime", str(ahead_s)]
    return words if subprocess.run(["unshare", *words, "--fork", "true"], capture_output=True).returncode == 0 else []


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _environ() -> str:
    """For every login; what the tests look for in the environment of all that they have started."""
    wanted = [key for key in os.environ if key.startswith("NBDDP_TESTS")]
    return " ".join(f"{key}={os.environ[key]}" for key in wanted)


def _free_network() -> str:
    """A /24 of the range that is set aside for tests of networks (RFC 2544), with nobody on it."""
    routes = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True, env=_env()).stdout
    numbers = ((os.getpid() + i) % 254 + 1 for i in range(254))
    return next(f"198.18.{n}" for n in numbers if f"198.18.{n}." not in routes)


def _give_docker0(pid: int) -> None:
    """As Docker makes it where a container runs: the same address on every machine."""
    _ip(pid, "link", "add", "docker0", "type", "bridge")
    _ip(pid, "addr", "add", "172.17.0.1/16", "dev", "docker0")
    _ip(pid, "link", "add", "veth0", "type", "veth", "peer", "veth1")
    _ip(pid, "link", "set", "veth0", "master", "docker0", "up")
    _ip(pid, "link", "set", "veth1", "up")
    _ip(pid, "link", "set", "docker0", "up")


def _ip(pid: int, *words: str, check: bool = True) -> None:
    """``ip`` in the network of that process; 0: here."""
    there = ["nsenter", "--target", str(pid), "--net", "--"] if pid else []
    _quietly(*there, "ip", *words, check=check)


def _quietly(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_env(), timeout=30)
    if check and done.returncode:
        raise NotHere(f"{shlex.join(command)}: {done.stderr.strip()}")


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _wait_for_port(address: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with socket.create_connection((address, 22), 1):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotHere(f"no sshd answers at {address}: {error}") from None
            time.sleep(0.01)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its stdin ends, and with it whatever runs in its namespace."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)  # --kill-child takes the namespace along
        process.wait()


def is_sshd(process: psutil.Process) -> bool:
    """A session's, too: since OpenSSH 9.8 that is a program of its own, ``sshd-session``."""
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("sshd")
    return False


def _says(process: psutil.Process, text: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return text in " ".join(process.cmdline())
    return False


def _is_shell(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name() in ("sh", "bash", "dash")
    return False


def _told(one: object) -> str:
    if isinstance(one, psutil.Process):
        with contextlib.suppress(psutil.Error):
            return f"{one.pid} {one.status()} {' '.join(one.cmdline())[:200]}"
    return str(one)


if __name__ == "__main__":
    with Rig(Path.cwd()) as rig:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, "PATH": f"{rig.plain_ssh()}:{_path()}"}).returncode)
