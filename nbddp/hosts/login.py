"""The command line that starts an agent on a host, and advice on the errors of ssh and the shell there."""

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
# The names that ssh accepts, including IPv6 addresses and URIs, and names of containers and pods. None of the
# characters has a meaning for a shell.
_NAME = re.compile(r"(ssh://)?(\w[\w.+-]*@)?(\[[\w:.%]+\]|[\w:][\w.:%/-]*)(:\d+)?")
_NO_PYTHON = "nbddp found no Python: "
# Advice by a part of what ssh or the shell wrote.
_ADVICE = (
    ("Could not resolve hostname", "this machine cannot resolve that name; is it spelt as in ~/.ssh/config?"),
    ("Permission denied", "it refused your key: `ssh {host}` must log in without a password (try ssh-copy-id {host})"),
    ("Host key verification failed", "its host key is unknown or has changed: log in once by hand, `ssh {host}`"),
    ("Connection refused", "no ssh server answers there"),
    ("timed out", "it does not answer; is it up, and reachable from here?"),
    ("No route to host", "it does not answer; is it up, and reachable from here?"),
    ("No module named 'nbddp", "nbddp is not installed for that Python: pip install nbddp=={version} there"),
    ("No module named nbddp", "nbddp is not installed for that Python: pip install nbddp=={version} there"),
    ("No module named", "that Python lacks a package that nbddp needs: pip install nbddp=={version} there"),
    (f"\n{_NO_PYTHON}", "pass its path: nbddp.cluster(hosts, python='/path/to/python')"),
)


def advice_for(host: str, output: str) -> str:
    """Return advice on a login that failed with this output; "" if there is none."""
    found = next((advice for part, advice in _ADVICE if part in f"\n{output}"), "")
    return found.format(host=host, version=versions()["nbddp"])


def silent_login(host: str, what: str) -> str:
    """Return advice on a login that ended, or did not answer, without a word of output."""
    if what.startswith("no answer"):
        return f"does a start-up file of the shell there, such as ~/.bashrc, wait for input? Try `ssh -T {host} true`"
    if what.endswith("exit code 0"):
        return "the login ended before nbddp began: an exit or exec in ~/.bashrc there, or a key that runs one command"
    return ""


def is_name(host: str) -> bool:
    """Return whether this can be the name of a host, and cannot be an option or a shell command."""
    return _NAME.fullmatch(host) is not None


def command_for(host: str, template: Sequence[str], python: str | None, setup: str = "") -> list[str]:
    """Return the command line that starts the agent on that host; its stdin and stdout are the control pipe.

    Args:
        setup: the user's shell commands before it; they get no input, and their output goes to stderr.
    """
    if host == HERE:
        return [os.path.expanduser(python or sys.executable), "-m", "nbddp.agent"]
    words = [word.replace("{host}", host) for word in template]
    candidates = [python] if python is not None else [sys.executable, "python3", "python"]
    script = (
        f"for p in {' '.join(map(_quoted, candidates))}; "
        'do command -v "$p" >/dev/null 2>&1 && exec "$p" -m nbddp.agent; done; '
        f"echo {shlex.quote(_NO_PYTHON + ' '.join(candidates))} >&2; exit 127"
    )
    agent = ["sh", "-c", script]
    if setup:
        agent = ["bash", "-lc", f"{{ {setup}\n}} </dev/null >&2 || exit; {script}"]
    # ssh, also behind sshpass or env, passes one line to the remote login shell; other launchers pass the words.
    by_ssh = any(os.path.basename(word) == "ssh" for word in template)
    return [*words, shlex.join(agent)] if by_ssh else [*words, *agent]


def _quoted(path: str) -> str:
    """Quote for a shell, except that ``~`` becomes the home on the host."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def slurm_nodes(nodes: str = "") -> list[str]:
    """Return the names of these nodes, by default this allocation's. Raises LaunchError outside of an allocation."""
    nodes = nodes or os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise LaunchError(
            "hosts='slurm' needs a Slurm allocation: start the notebook with salloc, srun or sbatch, or on a login "
            "node ask for nodes: nbddp.cluster('slurm', nodes=2, gpus_per_node=8, time='2:00:00')"
        )
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol could not list the nodes of {nodes}: {error}") from error
    return listed.stdout.split()
