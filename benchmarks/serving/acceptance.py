"""An exported drafter in the real engine: its own acceptance counts, and its texts beside plain serving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IN_FLIGHT = 8


@dataclass(frozen=True)
class ServedAcceptance:
    """What the engine counted, and how its texts compare with plain serving by the same engine.

    Args:
        served: 1 + accepted drafts / rounds, by the engine's ``/metrics``.
        evaluated: acceptance length in ``reports/evaluation.json``.
        ties: texts whose first difference is a numeric tie by the local target.
        different: texts that differ otherwise.
    """

    served: float
    evaluated: float
    rounds: int
    num_answers: int
    equal: int
    ties: int
    different: int
    dtype: str


def served_acceptance(root: Path, overrides: Sequence[str], say: Callable[[str], None]) -> ServedAcceptance:
    """Answer evaluate's prompts by a server with the drafter and by one without.

    Raises:
        EyasError: the project is not exported, or a server does not start.
        SystemExit: it is not evaluated, or on other answers than these.
    """
    from eyas.base.files import read_json
    from eyas.stages.chat_tools import load_renderer
    from eyas.stages.evaluate.prompts import held_out_conversations
    from eyas.stages.evaluate.stage import EvaluateStage
    from eyas.stages.project import Project
    from eyas.targets.serving.manager import Servers
    from eyas.targets.serving.speculation import read_speculation

    project = Project.open(root, overrides)
    layout, config = project.layout, project.config
    look = EvaluateStage().look(project)
    if look.state != "done":
        raise SystemExit(f"eyas evaluate has to end with the same settings first: {look.state}")
    report = read_json(layout.evaluation)
    renderer = load_renderer(project)
    prompts = [p for c in held_out_conversations(project, renderer) if (p := c.next_prompt()) is not None]
    if len(prompts) != report["num_answers"]:
        counted = f"evaluate has {report['num_answers']} answers to {len(prompts)} prompts"
        raise SystemExit(f"{counted}: give it prompts of one turn each")
    ends = tuple(sorted(renderer.end_tokens))
    limit = config.evaluate.max_new_tokens
    logs = layout.root / "logs"
    plain_project = Servers.open(config, layout.root, "generate", log_folder=logs, say=say)
    with plain_project as servers:
        plain = served_answers(servers.servers[0], prompts, ends, limit)
    drafter = layout.exports / config.export.name
    with Servers.open(config, layout.root, "draft", log_folder=logs, drafter=drafter, say=say) as servers:
        server = servers.servers[0]
        before = read_speculation(server.address)
        drafted = served_answers(server, prompts, ends, limit)
        counts = read_speculation(server.address).since(before)
    equal, ties, different = _compare(project, str(report["dtype"]), prompts, plain, drafted)
    return ServedAcceptance(
        served=counts.acceptance_length,
        evaluated=float(report["acceptance_length"]),
        rounds=counts.rounds,
        num_answers=len(prompts),
        equal=equal,
        ties=ties,
        different=different,
        dtype=str(report["dtype"]),
    )


def served_answers(
    server: Any, prompts: Sequence[list[int]], ends: tuple[int, ...], limit: int
) -> list[list[int]]:
    """Greedy answers, a few at a time."""
    from eyas.targets.server.connection import Connection
    from eyas.targets.server.settings import ClientSettings
    from eyas.targets.server.wire import FLAVOURS, Sampling

    async def all_of_them() -> list[list[int]]:
        connection = Connection(server.url, ClientSettings(api_key=server.api_key or ""))
        free = asyncio.Semaphore(IN_FLIGHT)
        flavour, sampling = FLAVOURS[server.engine], Sampling(limit, ends, 0.0, 1.0, 0)

        async def one(number: int, tokens: list[int]) -> list[int]:
            async with free:
                path, body = flavour.answer(tokens, sampling, server.model, f"prompt-{number}")
                return flavour.read_answer(await connection.post(path, body, 1800.0), sampling).tokens

        found = await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))
        await connection.close()
        return list(found)

    return asyncio.run(all_of_them())


def _compare(
    project: Any, dtype: str, prompts: Sequence[list[int]], plain: list[list[int]], drafted: list[list[int]]
) -> tuple[int, int, int]:
    """Texts that are equal, differ first at a tie, or differ otherwise."""
    from eyas.stages.evaluate.ties import parting
    from eyas.targets.local.model import LocalTarget

    target: LocalTarget | None = None
    equal = ties = different = 0
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        if one == other:
            equal += 1
            continue
        if target is None:
            target = LocalTarget.load(project.resolved.model, "cpu", dtype)
        found = parting(target, prompt, one, other)
        ties += found is not None and found.tied
        different += found is not None and not found.tied
    return equal, ties, different
