"""Acceptance length by prediction, by the local engine and by a real server, side by side for several K."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

NAME = "agreement"
LIMIT = 0.03
"""Largest share by which any of them may differ from the local engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project", type=Path, required=True, help="a project that is trained and exported")
    parser.add_argument("--set", action="append", default=[], help="override a value of its eyas.toml")
    parser.add_argument("--drafts", default="1,3,5", help="lengths of the chain")
    parser.add_argument("--prompts", type=int, default=200, help="most held-out prompts, first turns")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--no-server", action="store_true", help="leave the real server out")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer held-out prompts in the three ways; the value is the largest difference, as a share.

    Where rounding parts the three's texts (bfloat16), they are measured on different ones. So prediction is
    also made along the texts that the engine and the server really wrote.
    """
    from benchmarks.serving.local_engine import LocalEngine

    from eyas.drafter.acceptance import AcceptanceCounts
    from eyas.stages.local_target import target_arithmetic
    from eyas.stages.project import Project
    from eyas.stages.records import recorded_capture_recipe

    chains = [int(word) for word in arguments.drafts.split(",")]
    limit = arguments.max_new_tokens
    overrides = [*arguments.set, f"evaluate.max_new_tokens={limit}"]
    project = Project.open(arguments.project, tuple(overrides))
    recorded = recorded_capture_recipe(project)
    _, dtype = target_arithmetic(project, str(recorded["compute_dtype"]) if recorded else None)
    overrides.append(f"target.dtype={dtype}")  # one arithmetic in all three, said to the server too
    engine = LocalEngine.open(project, arguments.prompts, dtype)
    plain = [answer.tokens for answer in engine.answers(None, limit)]
    rows: dict[int, dict[str, float]] = {}
    texts: dict[int, dict[str, int]] = {}
    along_plain = _predicted(engine, plain, max(chains))
    for chain in chains:
        drafted = engine.answers(engine.chain(chain), limit)
        counts = AcceptanceCounts.total((answer.counts for answer in drafted), chain)
        own = [answer.tokens for answer in drafted]
        rows[chain] = {
            "predicted": along_plain[chain - 1],
            "local": counts.acceptance_length,
            "predicted_along_local": _predicted(engine, own, chain)[-1],
        }
        texts[chain] = {"local": _equal(own, plain)}
        print(f"chain of {chain}: {rows[chain]}", file=sys.stderr)
    for chain in () if arguments.no_server else chains:
        one = Project.open(arguments.project, (*overrides, f"evaluate.num_drafts={chain}"))
        rows[chain]["served"], written = _served(one, engine.prompts, engine.end_tokens, limit)
        rows[chain]["predicted_along_served"] = _predicted(engine, written, chain)[-1]
        texts[chain]["served"] = _equal(written, plain)
        print(f"chain of {chain}: {rows[chain]}", file=sys.stderr)
    return _result(rows, texts, dtype, len(plain))


def _result(
    rows: dict[int, dict[str, float]], texts: dict[int, dict[str, int]], dtype: str, num_prompts: int
) -> dict[str, Any]:
    worst = max(
        abs(row[name] / row["local"] - 1) for row in rows.values() for name in ("predicted", "served")
        if name in row
    )  # fmt: skip
    along = max(
        abs(row[f"predicted_along_{name}"] / row[name] - 1)
        for row in rows.values()
        for name in ("local", "served")
        if name in row
    )
    return {
        "name": NAME,
        "value": round(worst, 4),
        "unit": "largest difference, as a share of the local engine's",
        "baseline": LIMIT,
        "ratio": round(worst / LIMIT, 4),
        "details": {
            "baseline_is": "the largest difference that is allowed",
            "within_limit": worst <= LIMIT,
            "along_the_same_texts": round(along, 4),
            "prompts": num_prompts,
            "dtype": dtype,
            "chains": {str(k): {n: round(v, 4) for n, v in row.items()} for k, row in rows.items()},
            "texts_equal_to_plain": {str(k): equal for k, equal in texts.items()},
        },
    }


def _equal(texts: list[list[int]], plain: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(texts, plain, strict=True))


def _predicted(engine: Any, answers: list[list[int]], max_drafts: int) -> list[float]:
    """Acceptance lengths of chains of 1 to ``max_drafts`` by the walk along these answers."""
    import numpy as np
    import torch

    from eyas.base.stop import StopFlag
    from eyas.drafter.batch import TrainingSample
    from eyas.drafter.prediction import predict, walk_counts
    from eyas.drafter.rows import last_state_rows

    samples = {}
    for number, (prompt, answer) in enumerate(zip(engine.prompts, answers, strict=True)):
        tokens = [*prompt, *answer]
        (states,) = engine.target.capture([tokens], list(engine.aux_layers))
        spans = ((len(prompt), len(tokens)),)
        rows = last_state_rows(spans, len(tokens))
        name = f"{number:06d}"
        last = states.last[torch.from_numpy(rows)]
        samples[name] = TrainingSample(name, np.array(tokens), spans, states.aux, last, rows)
    counts = walk_counts(
        engine.drafter,
        engine.vocabulary,
        _Held(samples),
        max_drafts=max_drafts,
        batch_tokens=2048,
        stop=StopFlag(),
    )
    return [one.acceptance_length for one in predict(counts, {name: name for name in counts})]


class _Held:
    """Samples in memory."""

    def __init__(self, samples: dict[str, Any]) -> None:
        self._samples = samples

    def lengths(self) -> dict[str, int]:
        return {name: len(sample.tokens) for name, sample in self._samples.items()}

    def supervised(self) -> dict[str, int]:
        return {name: sum(end - start for start, end in s.spans) for name, s in self._samples.items()}

    def load(self, ids: Any) -> list[Any]:
        return [self._samples[name] for name in ids]


def _served(
    project: Any, prompts: list[list[int]], ends: tuple[int, ...], limit: int
) -> tuple[float, list[list[int]]]:
    """Acceptance length by the counts of a server that is started for it, and what it wrote."""
    from benchmarks.serving.acceptance import served_answers

    from eyas.targets.serving.manager import Servers
    from eyas.targets.serving.speculation import read_speculation

    layout, config = project.layout, project.config

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    drafter = layout.exports / config.export.name
    opened = Servers.open(
        config, layout.root, "draft", log_folder=layout.root / "logs", drafter=drafter, say=say
    )
    with opened as servers:
        server = servers.servers[0]
        before = read_speculation(server.address)
        written = served_answers(server, prompts, ends, limit)
        return read_speculation(server.address).since(before).acceptance_length, written
