"""``eyas bench``: what a running server does with the drafter, and without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from eyas.base.errors import ConfigError, UsageError
from eyas.base.files import write_atomic
from eyas.cli.common import Common
from eyas.cli.output import note, print_json, table
from eyas.cli.progress import listener
from eyas.targets.bench.prompts import read_prompts
from eyas.targets.bench.run import run_bench
from eyas.targets.bench.server import look_at
from eyas.targets.serving.address import Address


def bench(
    url: str,
    *,
    prompts: Annotated[tuple[Path, ...], Parameter(name="--prompts")],
    plain_url: str | None = None,
    concurrency: str = "1",
    max_tokens: int = 256,
    temperature: float = 0.0,
    limit: int | None = None,
    seed: int = 0,
    model: str = "",
    plot: Path | None = None,
    api_key_env: str = "",
    ca_file: str = "",
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Measure a running vLLM or SGLang: acceptance length, tokens/s, time to first token and per token.

    All turns of all prompts are asked as a chat client would, none twice. Acceptance comes from the
    server's own counts. With --plain-url the same is done on a server without a drafter: that gives the
    speed-up, equality of texts at temperature 0, and the best number of drafts.

    Args:
        url: the server with the drafter, as http://127.0.0.1:8000.
        prompts: JSONL of prompts in any form that prepare reads; may be repeated.
        plain_url: a server of the same target without a drafter.
        concurrency: conversations in flight at a time, as 1,4,16.
        max_tokens: longest answer.
        temperature: 0 is greedy.
        limit: use at most this many prompts.
        seed: decides the order of the prompts, and the answers above temperature 0.
        model: name to ask for; by default the server's only one.
        plot: write an HTML page with charts to this file.
        api_key_env: environment variable with the key that both servers ask for.
        ca_file: certificates to trust for https.
    """
    levels = parse_concurrencies(concurrency)
    if max_tokens < 1 or temperature < 0 or (limit is not None and limit < 1):
        raise UsageError(
            "--max-tokens and --limit are at least 1, --temperature at least 0", hint="eyas bench --help"
        )
    asked = read_prompts(prompts, limit=limit, seed=seed)
    key = _key(api_key_env)
    server = look_at(Address(_url(url), key, ca_file), model)
    plain = look_at(Address(_url(plain_url), key, ca_file), model) if plain_url else None
    result = run_bench(
        server,
        plain,
        asked,
        levels,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        progress=listener("bench", common.json),
    )
    if plot is not None:
        from eyas.report.bench import bench_page

        write_atomic(plot, bench_page(result))
    if common.json:
        print_json({**result.as_dict(), "plot": str(plot) if plot else None})
        return 0
    from eyas.report.bench import speed_table, summary

    columns, rows = speed_table(result)
    title = f"{result.model} ({result.engine}), {result.num_prompts} prompts; ms: median, 95%"
    table(title, columns, rows)
    for what, text in summary(result):
        print(f"{what}: {text}")
    if plot is not None:
        note(f"\n{plot} has the charts")
    return 0


def parse_concurrencies(text: str) -> list[int]:
    """``1,4,16`` as ascending numbers from 1 on, each once. Raises UsageError."""
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise UsageError(f"--concurrency {text} is no list of numbers", hint="write it as 1,4,16")
    return found


def _url(text: str) -> str:
    """An address without the path that OpenAI clients take. Raises UsageError."""
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"{text} is no address of a server", hint="write it as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


def _key(variable: str) -> str | None:

    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(
            f"the environment variable {variable} is not set",
            where="--api-key-env",
            hint=f"export {variable}=KEY",
        )
    return key or None
