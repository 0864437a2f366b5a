"""Verbs with ``--host``: done there, by the eyas that was pushed there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.base.errors import HostUnreachable
from eyas.cli.common import SUFFIX_VARIABLE
from eyas.cli.words import value_of, without
from eyas.config.load import load_config
from eyas.hosts.declared import declared, open_host
from eyas.hosts.push import command, is_there, package_archive, package_folder, project_place


def forward(words: Sequence[str], name: str) -> int | None:
    """Run the verb on a host with its output here; returns its exit code.

    None: this eyas is not there, and the verb (doctor) can look at the machine without it.

    Raises:
        NoProject, ConfigError: here, where hosts are declared.
        HostUnreachable: no way answers, or eyas is not there.
    """
    root = Path(value_of(words, "--project") or ".").resolve()
    spec = declared(load_config(root), name)
    host = open_host(spec)
    folder = package_folder(host, package_archive())
    if not is_there(host, folder):
        if words[0] == "doctor":
            return None
        raise HostUnreachable(f"this eyas is not on {name}", where=folder, hint=f"eyas push --host {name}")
    rest = without(without(words, "--host"), "--project")
    again = f"--host {name}" + (f" --project {project}" if (project := value_of(words, "--project")) else "")
    there = command(spec, folder, [*rest, "--project", project_place(spec)])
    return host.stream(["env", f"{SUFFIX_VARIABLE}={again}", *there])
