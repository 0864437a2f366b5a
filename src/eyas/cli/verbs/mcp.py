"""``eyas mcp``: the project's verbs as tools for agents, over standard input and output."""

from __future__ import annotations

from typing import Any

from eyas.base.errors import EyasError, UsageError
from eyas.cli.common import Common


def mcp(
    *,
    allow_recover: bool = False,
    yes_stop_services: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Serve status, doctor, todo, plan and recover to an agent by the Model Context Protocol (stdio).

    Recover is a dry run unless it is allowed here; an agent cannot allow it itself.

    Args:
        allow_recover: let the tool recover change things.
        yes_stop_services: ... and stop, disable and mask services that hold the GPUs.
    """
    common.open()  # says now what is wrong with the project, not at the first call
    try:
        server = build_server(common, allow_recover, yes_stop_services)
    except ImportError as error:
        raise UsageError(
            "the MCP SDK is not installed", why=str(error), hint="pip install 'eyas[agents]'"
        ) from error
    server.run("stdio")
    return 0


def build_server(common: Common, allow_recover: bool, yes_stop_services: bool) -> Any:
    """The server with its five tools. Raises ImportError without the SDK."""
    from mcp.server import MCPServer

    from eyas import __version__

    server = MCPServer(
        "eyas",
        version=__version__,
        instructions=(
            "Operates one eyas project: call doctor or status first, plan before recover. "
            "Every answer is a JSON object; an error has the keys error, what, where, why, hint."
        ),
    )

    @server.tool()
    def status() -> dict[str, Any]:
        """Where every stage stands, what runs, and the one next command."""
        from eyas.report.status import project_status

        last = common.as_last_run()
        return _answer(lambda: project_status(last.open(), last.suffix).as_dict())

    @server.tool()
    def doctor(deep: bool = False) -> dict[str, Any]:
        """What survived, what is damaged, what mends it. deep hashes everything and may take long."""
        from eyas.recovery.doctor import diagnose
        from eyas.recovery.scene import Scene

        return _answer(lambda: diagnose(Scene(common.as_last_run().open(), deep=deep)).as_dict())

    @server.tool()
    def todo() -> dict[str, Any]:
        """The recorded todos of the newest phase: id, content, priority, status, depends_on, evidence."""
        from eyas.cli.verbs.todo import recorded

        return _answer(lambda: recorded(common.open().layout))

    @server.tool()
    def plan() -> dict[str, Any]:
        """The todos that recover would carry out now, in order; changes nothing."""
        return _answer(lambda: _plan(common))

    @server.tool()
    def recover(only: str | None = None) -> dict[str, Any]:
        """Mend what doctor finds and resume the run; a dry run (the plan) unless allowed at the start."""
        if not allow_recover:
            hint = "started without --allow-recover: this is the plan, nothing was changed"
            return _answer(lambda: _plan(common) | {"dry_run": True, "hint": hint})
        return _answer(lambda: _recover(common, only, yes_stop_services))

    return server


def _answer(work: Any) -> dict[str, Any]:
    """The work's answer, or an error in its parts: an agent reads both."""
    import json

    try:
        return dict(json.loads(json.dumps(work(), default=str)))
    except EyasError as error:
        return error.as_dict()


def _plan(common: Common) -> dict[str, Any]:
    from eyas.cli.verbs.recover import as_todo
    from eyas.recovery.executor import planned
    from eyas.recovery.plan import notes
    from eyas.recovery.scene import Scene
    from eyas.store.todos import as_todo_list

    found, steps = planned(Scene(common.as_last_run().open()))
    return as_todo_list(as_todo(step) for step in steps) | {"notes": [f.as_dict() for f in notes(found)]}


def _recover(common: Common, only: str | None, yes_stop_services: bool) -> dict[str, Any]:
    from eyas.cli.verbs.recover import as_dict
    from eyas.recovery.bench import Bench
    from eyas.recovery.executor import recover as carry_out
    from eyas.recovery.scene import Scene

    common = common.as_last_run()
    bench = Bench(Scene(common.open()), may_stop_services=yes_stop_services, resume_words=common.set_words)
    return as_dict(carry_out(bench, only))
