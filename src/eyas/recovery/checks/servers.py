"""Servers that eyas started, and those of others that it uses: do they answer, and with the right model?"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from eyas.base.errors import DamageFound, EyasError
from eyas.recovery.findings import SERVER_EXIT, Check, Finding, Line, verdict
from eyas.recovery.scene import Scene

SECONDS = 2.0
"""Patience with one answer: doctor has to be quick."""


@dataclass(frozen=True)
class ServerFacts:
    """One server: ``state`` as `look_at_servers` names it, or ``ok``, ``refused``, ... of a foreign one."""

    url: str
    state: str
    ours: bool
    model: str
    served: tuple[str, ...]
    pid: int | None
    used_by: int | None
    kept: bool


@dataclass(frozen=True)
class AllServers:
    servers: tuple[ServerFacts, ...]
    damaged: DamageFound | None


def look(scene: Scene) -> AllServers:
    serve, found = scene.project.config.serve, []
    if not scene.layout.servers.exists() and not serve.urls:
        return AllServers((), None)
    from eyas.targets.serving.address import Address  # its HTTP client is loaded only where there is a server
    from eyas.targets.serving.overview import look_at_servers
    from eyas.targets.serving.records import ServerBook

    key = os.environ.get(serve.api_key_env) if serve.api_key_env else None
    try:
        views = look_at_servers(ServerBook(scene.layout.servers), serve)
    except DamageFound as error:
        return AllServers((), error)
    for view in views:
        record = view.record
        served = _served(Address(record.url, key)) if view.state == "running" else ()
        found.append(
            ServerFacts(
                record.url,
                view.state,
                True,
                record.model,
                served,
                record.process.pid,
                view.used_by,
                record.keep,
            )
        )
    for url in serve.every_url:
        address = Address(url, key, serve.ca_file)
        answer = address.health(SECONDS)
        served = _served(address) if answer == "ok" else ()
        found.append(ServerFacts(url, answer, False, "", served, None, None, True))
    return AllServers(tuple(found), None)


def _served(address: object) -> tuple[str, ...]:
    """Names of the models that a server says it serves; none when it does not say."""
    from eyas.targets.serving.address import Address

    assert isinstance(address, Address)
    with contextlib.suppress(EyasError, OSError, ValueError, KeyError, TypeError):
        return tuple(str(entry["id"]) for entry in address.json("/v1/models", timeout=SECONDS)["data"])
    return ()


def judge(scene: Scene, facts: AllServers) -> Line:
    if facts.damaged is not None:
        error = facts.damaged
        finding = Finding(
            "server-list-damaged", "state/servers.json", "damage", error.what, (error.why or "",),
            mend=error.hint or "move state/servers.json away",
        )  # fmt: skip
        return verdict("servers", [finding], "")
    if not facts.servers:
        return Line("servers", "skipped", "no server of eyas runs, and none is declared in serve.urls")
    judged = [_finding(server) for server in facts.servers]
    findings = [found for found in judged if found is not None]
    evidence = [
        f"{s.url}: {s.state}, serves {', '.join(s.served) or 'unknown'}"
        + ("" if s.used_by is None else f", used by process {s.used_by}")
        for s in facts.servers
    ]
    return verdict("servers", findings, f"{len(facts.servers)} servers answer", evidence)


def _finding(server: ServerFacts) -> Finding | None:
    detail = {"url": server.url, "pid": server.pid}
    seen = (f"{server.url} is {server.state}",)
    if not server.ours:
        if server.state == "ok":
            return None
        what = f"the server at {server.url} does not answer ({server.state})"
        hint = "start it again, or mend serve.urls in eyas.toml"
        return Finding("server-unreachable", server.url, "failed", what, seen, hint, SERVER_EXIT, detail)
    if server.state == "ended":
        what = f"the server at {server.url} is gone"
        return Finding("server-ended", server.url, "warn", what, seen, exit_code=SERVER_EXIT, detail=detail)
    if server.state in ("failing", "silent"):
        what = f"the server at {server.url} (process {server.pid}) does not answer"
        return Finding(
            "server-silent", server.url, "failed", what, seen, exit_code=SERVER_EXIT, detail=detail
        )
    if server.served and server.model and server.model not in server.served:
        what = f"the server at {server.url} serves {', '.join(server.served)}, not {server.model}"
        return Finding(
            "server-wrong-model", server.url, "failed", what, seen, exit_code=SERVER_EXIT, detail=detail
        )
    if server.used_by is None and not server.kept:
        what = f"the server at {server.url} (process {server.pid}) was left by a run that is gone"
        return Finding("server-left", server.url, "warn", what, seen, exit_code=SERVER_EXIT, detail=detail)
    return None


CHECK = Check("servers", look, judge)
