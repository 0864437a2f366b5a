"""The MCP server, spoken to by the SDK's own client over stdio."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.projects import make_project, tiny_target
from tests.recovery.trees import tree_digest

mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed (pip install 'eyas[agents]')")


async def _ask(
    root: Path, calls: list[tuple[str, dict[str, Any]]], *options: str
) -> tuple[set[str], list[Any]]:
    parameters = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "eyas", "mcp", "--project", str(root), *options],
        env={**os.environ},
    )
    async with (
        mcp.stdio_client(parameters) as (reading, writing),
        mcp.ClientSession(reading, writing) as session,
    ):
        await session.initialize()
        tools = {tool.name for tool in (await session.list_tools()).tools}
        answers = []
        for name, arguments in calls:
            result = await session.call_tool(name, arguments)
            structured = getattr(result, "structured_content", None) or getattr(
                result, "structuredContent", None
            )
            answers.append(structured or json.loads(result.content[0].text))
        return tools, answers


def test_an_agent_looks_plans_and_changes_nothing(tmp_path: Path) -> None:
    import anyio

    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"))
    before = tree_digest(tmp_path)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("status", {}), ("doctor", {}), ("todo", {}), ("plan", {}), ("recover", {}),
    ]  # fmt: skip
    tools, answers = anyio.run(_ask, root, calls)
    assert tools == {"status", "doctor", "todo", "plan", "recover"}
    status, doctor, todo, plan, recover = answers
    assert status["next_command"].startswith("eyas run")
    assert {check["check"] for check in doctor["checks"]} >= {"mounts", "gpus", "store"}
    assert todo == {"todos": []}
    assert [entry["id"] for entry in plan["todos"]] == ["resume", "continuity", "watch"]
    assert recover["dry_run"] is True
    assert recover["todos"] == plan["todos"]
    assert tree_digest(tmp_path) == before


def test_errors_reach_the_agent_in_their_parts(tmp_path: Path) -> None:
    import anyio

    root = make_project(tmp_path / "p", tiny_target(tmp_path / "model"))

    async def scenario() -> Any:
        return await _ask(root, [("recover", {"only": "nonsense"})], "--allow-recover")

    _, (answer,) = anyio.run(scenario)
    assert answer["error"] == "UsageError"
    assert "resume" in answer["why"]
