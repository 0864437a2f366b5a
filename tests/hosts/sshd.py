"""A real sshd on a loopback port with keys made for the test, and an ``ssh`` on PATH that knows it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class Server:
    """``peer`` and ``silent`` are names for ssh; ``bin`` holds an ssh that knows them."""

    bin: Path
    log: Path
    peer: str = "eyas-test-peer"
    silent: str = "eyas-test-silent"


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """Start it; skips aloud without openssh-server."""
    if not Path(SSHD).exists():
        pytest.skip("openssh-server is not installed (apt-get install openssh-server)")
    folder.mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=60
        )
    shutil.copy(folder / "user.pub", folder / "authorized")
    os.chmod(folder / "authorized", 0o600)
    separation = Path("/run/sshd")
    if os.getuid() == 0:
        separation.mkdir(exist_ok=True)
    with socket.socket() as probe, socket.socket() as silent:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections and never says a word
        probe.close()
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            "PermitRootLogin yes\nAcceptEnv EYAS_*\n"
        )
        common = (
            f"  HostName 127.0.0.1\n  User {getpass.getuser()}\n  IdentityFile {folder}/user\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n"
        )
        (folder / "ssh_config").write_text(
            f"Host eyas-test-peer\n  Port {port}\n{common}"
            f"Host eyas-test-silent\n  Port {silent.getsockname()[1]}\n{common}"
        )
        tools = folder / "bin"
        tools.mkdir()
        wrapper = tools / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        log = folder / "sshd.log"
        with open(log, "wb") as output:
            server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=output)
        try:
            _await(port, server, log)
            yield Server(tools, log)
        finally:
            server.terminate()
            server.wait(30)


def _await(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"sshd does not listen: {log.read_text()}")
