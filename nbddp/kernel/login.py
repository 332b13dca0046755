"""Kernel side. How to start an agent on a host: the command line, and what to do when its last words are ssh's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from nbddp.errors import LaunchError
from nbddp.versions import versions

HERE = "localhost"
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "{host}")
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}")
# What ssh takes, an IPv6 address and a URI included, and containers and pods are called. No shell makes anything of it.
_NAME = re.compile(r"(ssh://)?(\w[\w.+-]*@)?(\[[\w:.%]+\]|[\w:][\w.:%/-]*)(:\d+)?")
# Of ssh's and the shell's last words: what to do about them.
_ADVICE = (
    ("Could not resolve hostname", "no machine of that name is known here; is it spelt as in ~/.ssh/config?"),
    ("Permission denied", "it refused your key: `ssh {host}` must log in without a password (try ssh-copy-id {host})"),
    (
        "Host key verification failed",
        "its host key is not known, or has changed: log in by hand once, `ssh {host}`",
    ),
    ("Connection refused", "no ssh server answers there"),
    ("timed out", "it does not answer; is it up, and reachable from here?"),
    ("No route to host", "it does not answer; is it up, and reachable from here?"),
    ("No module named 'nbddp", "nbddp is not installed for that Python: pip install nbddp=={version} there"),
    ("No module named nbddp", "nbddp is not installed for that Python: pip install nbddp=={version} there"),
    (
        "No module named",
        "that Python lacks a package; the same ones as here are needed: pip install nbddp=={version} there",
    ),
    ("no Python", "say which one by nbddp.cluster(hosts, python='/path/to/python')"),
)


def advice_on(host: str, said: str) -> str:
    """What to do about a login that ended with these words; "" if nothing is known."""
    found = next((advice for sign, advice in _ADVICE if sign in said), "")
    return found.format(host=host, version=versions()["nbddp"])


def is_name(host: str) -> bool:
    """Can it be the name of a host, and nothing else?"""
    return _NAME.fullmatch(host) is not None


def command_for(host: str, template: Sequence[str], python: str | None) -> list[str]:
    """The command line that starts the agent on that host; its stdin and stdout are the pipe."""
    if host == HERE:
        return [os.path.expanduser(python or sys.executable), "-m", "nbddp.host"]
    words = [word.replace("{host}", host) for word in template]
    agent = ["sh", "-c", _script(python)]
    # ssh, also behind sshpass or env, hands its words to the login shell there as one line; others start them as such.
    by_ssh = any(os.path.basename(word) == "ssh" for word in template)
    return [*words, shlex.join(agent)] if by_ssh else [*words, *agent]


def _script(python: str | None) -> str:
    candidates = [python] if python is not None else [sys.executable, "python3", "python"]
    named = " ".join(map(_in_shell, candidates))
    return (
        f'for p in {named}; do command -v "$p" >/dev/null 2>&1 && exec "$p" -m nbddp.host; done; '
        f"echo {shlex.quote('there is no Python: ' + ' '.join(candidates))} >&2; exit 127"
    )


def _in_shell(path: str) -> str:
    """Quoted, but for the home, which is the one there."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def slurm_nodes() -> list[str]:
    """The names of this allocation's nodes. Raises LaunchError if there is none."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise LaunchError("hosts='slurm' works inside an allocation: start the notebook with salloc, srun or sbatch")
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol does not tell the nodes of {nodes}: {error}") from error
    return listed.stdout.split()
