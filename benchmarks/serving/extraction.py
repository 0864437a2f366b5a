"""Extraction through a server beside the same kind of server's own prefill, and beside its engine's own way.

Three servers run, and rounds over the same prompts take turns:

- *prefill*: one token each, no states, by a plain server;
- *extraction*: the stage's own code, from the first request to the last commit in a new store;
- *own way*: states as the engine itself hands them over (`benchmarks.serving.own_way`), read and let go.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.case import make_project, make_samples
from benchmarks.serving.cpu import CpuWatch
from benchmarks.serving.on_cpu import REPOSITORY
from benchmarks.serving.own_way import DESCRIBED, own_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = REPOSITORY / ".models" / "smollm2-135m-instruct"
    python = os.environ.get("EYAS_SERVERS_PYTHON", str(REPOSITORY / ".servers" / "bin" / "python"))
    parser.add_argument(
        "--model", type=Path, default=model, help="folder of the target; `make demo` makes it"
    )
    parser.add_argument("--python", default=python, help="Python of the engine's environment; `make servers`")
    parser.add_argument("--serve", type=Path, help="file with a [serve] table, instead of one for a CPU")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of one round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, in turn; the best counts")
    parser.add_argument("--in-flight", type=int, default=16384, help="client.tokens_in_flight, of all")
    parser.add_argument("--dtype", default="float32", help="arithmetic of the servers")


@dataclass
class Way:
    """One way through a server, and what its rounds took; as a context it times what is done within.

    Attributes:
        pid: first process of its server.
        go: does one round, given its number, the part that counts within this context.
        seconds: of each round, by the clock.
        server_seconds, client_seconds: CPU seconds of each round, of all processes of the server and of
            this one.
    """

    name: str
    pid: int
    go: Callable[[int, Way], None]
    seconds: list[float] = field(default_factory=list)
    server_seconds: list[float] = field(default_factory=list)
    client_seconds: list[float] = field(default_factory=list)
    _before: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._watch = CpuWatch(self.pid)

    def __enter__(self) -> None:
        self._watch.__enter__()
        self._before = time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        client, started = self._before
        self.seconds.append(time.perf_counter() - started)
        self.client_seconds.append(time.process_time() - client)
        self._watch.__exit__()
        self.server_seconds.append(self._watch.seconds)

    def warm_up(self) -> None:
        """One round that does not count."""
        self.go(-1, self)
        for kept in (self.seconds, self.server_seconds, self.client_seconds):
            kept.clear()

    def best(self, num_tokens: int) -> float:
        """Tokens per second of the quickest round."""
        return num_tokens / min(self.seconds)

    def as_dict(self, num_tokens: int) -> dict[str, object]:
        return {
            "tokens_per_second": [round(num_tokens / seconds, 1) for seconds in self.seconds],
            "best": round(self.best(num_tokens), 1),
            "server_cpu_seconds_per_1000_tokens": [
                round(1000 * seconds / num_tokens, 3) for seconds in self.server_seconds
            ],
            "client_cpu_seconds_per_1000_tokens": [
                round(1000 * seconds / num_tokens, 3) for seconds in self.client_seconds
            ],
        }


def measure(name: str, engine: str, limit: float, arguments: argparse.Namespace) -> dict[str, object]:
    """Start the servers, let the ways take turns, and compare."""
    if not (arguments.model / "config.json").is_file():
        raise SystemExit(f"there is no target in {arguments.model}: make demo, or give --model FOLDER")
    if not Path(arguments.python).exists():
        raise SystemExit(f"there is no engine at {arguments.python}: make servers, or give --python")

    samples = make_samples(arguments.tokens, arguments.model)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    with ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        ways = _open(opened, place, engine, arguments, samples)
        for way in ways:
            way.warm_up()
        for number in range(arguments.rounds):
            for way in (*ways[number % 3 :], *ways[: number % 3]):
                way.go(number, way)
            told = ", ".join(f"{way.name} {num_tokens / way.seconds[-1]:,.0f}" for way in ways)
            _say(f"round {number + 1}: {told} tokens/s")
    best = {way.name: way.best(num_tokens) for way in ways}
    ratio, beside_own = best["extraction"] / best["prefill"], best["extraction"] / best["own way"]
    prefill, extraction, own = ways
    return {
        "name": name,
        "value": round(best["extraction"], 1),
        "unit": "tokens/s",
        "baseline": round(best["prefill"], 1),
        "ratio": round(ratio, 3),
        "details": {
            "baseline_is": f"the same prompts, one token each, on a plain {engine} server",
            "limit": limit,
            "within_limit": ratio >= limit,
            "own_way": round(best["own way"], 1),
            "ratio_to_own_way": round(beside_own, 3),
            "own_way_is": DESCRIBED[engine],
            "at_least_own_way": beside_own >= 1,
            "tokens": num_tokens,
            "samples": len(samples),
            "dtype": arguments.dtype,
            "model": arguments.model.name,
            "ways": {way.name: way.as_dict(num_tokens) for way in ways},
            # of rounds side by side: beside other work a CPU second does more at one time than at another
            "ratio_by_cpu_seconds_of_the_server": _middle(prefill, extraction),
            "ratio_to_own_way_by_cpu_seconds_of_the_server": _middle(own, extraction),
        },
    }


def _middle(other: Way, extraction: Way) -> float:
    """Median over rounds of another way's CPU seconds over extraction's."""
    pairs = zip(other.server_seconds, extraction.server_seconds, strict=True)
    return round(statistics.median(theirs / ours for theirs, ours in pairs), 3)


def _open(
    opened: ExitStack, place: Path, engine: str, arguments: argparse.Namespace, samples: Sequence[Any]
) -> list[Way]:
    """Start all three servers."""
    from eyas.targets.serving.manager import Servers

    project = make_project(place / "capture", engine, arguments, samples)
    # prompts come again each round, and vLLM would remember them
    no_memory = "no-enable-prefix-caching = true\n" if engine == "vllm" else ""
    plain = make_project(place / "plain", engine, arguments, samples, no_memory)
    capturing = opened.enter_context(
        Servers.open(project.config, project.layout.root, "capture", log_folder=place, say=_say)
    )
    others = opened.enter_context(
        Servers.open(plain.config, plain.layout.root, "generate", log_folder=place, say=_say)
    )
    own = opened.enter_context(own_server(project, place))
    prompts = [sample.tokens.tolist() for sample in samples]

    def asking(url: str, ask: Ask) -> Callable[[int, Way], None]:
        return lambda number, way: asyncio.run(_ask_all(url, ask, prompts, arguments.in_flight, way))

    def extract(number: int, way: Way) -> None:
        _capture(project, capturing, number, way)

    bare = others.servers[0]
    return [
        Way("prefill", _pid(bare), asking(bare.url, _one_token(engine, bare))),
        Way(
            "extraction",
            _pid(capturing.servers[0]),
            extract,
        ),
        Way("own way", own.pid, asking(own.url, own.states)),
    ]


def _pid(server: Any) -> int:
    if server.pid is None:
        raise SystemExit("the server is not one that this benchmark started")
    return int(server.pid)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


Ask = Callable[[Any, list[int]], Awaitable[None]]
"""One request, by a client, for a prompt."""


def _one_token(engine: str, server: Any) -> Ask:
    from eyas.targets.server.wire import FLAVOURS, Sampling

    async def ask(client: Any, tokens: list[int]) -> None:
        path, body = FLAVOURS[engine].answer(tokens, Sampling(1, (), 0.0, 1.0, 0), server.model, "bare")
        body.pop("rid", None)
        (await client.post(path, json=body)).raise_for_status()

    return ask


async def _ask_all(url: str, ask: Ask, prompts: Sequence[list[int]], in_flight: int, way: Way) -> None:
    """All prompts, longest first, under the budget of tokens in flight that extraction has."""
    import httpx

    room, changed = [in_flight], asyncio.Condition()
    limits = httpx.Limits(max_connections=None)

    async def one(client: httpx.AsyncClient, tokens: list[int]) -> None:
        async with changed:
            await changed.wait_for(lambda: room[0] >= len(tokens) or room[0] == in_flight)
            room[0] -= len(tokens)
        await ask(client, tokens)
        async with changed:
            room[0] += len(tokens)
            changed.notify_all()

    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False) as client:
        with way:
            await asyncio.gather(*(one(client, tokens) for tokens in sorted(prompts, key=len, reverse=True)))


def _capture(project: Any, servers: Any, number: int, way: Way) -> None:
    """The stage's own loop into a new store."""
    from eyas.base.files import set_aside
    from eyas.base.progress import SilentProgress
    from eyas.base.stop import StopFlag
    from eyas.stages.extract.items import Item
    from eyas.stages.extract.left import find_left
    from eyas.stages.extract.served import capture_served
    from eyas.stages.extract.stage import capture_recipe
    from eyas.stages.protocol import RunContext
    from eyas.stages.served_target import open_target, served_dtype
    from eyas.store.ledger import Ledger
    from eyas.store.samples import read_samples

    layout = project.layout
    for path in (layout.store, layout.state / "ledger.db"):
        if path.exists():
            set_aside(path, layout.set_aside, "the next round begins anew")
    with Ledger.open(layout.ledger) as ledger:
        find_left(layout, ledger, project.config.extract.batch_tokens, SilentProgress())
        items = {s.id: Item(s.id, s.tokens, s.spans) for s in read_samples(layout.samples)}
        context = RunContext(ledger, SilentProgress(), StopFlag(), number + 2)
        recipe = capture_recipe(project, "benchmark", served_dtype(project, None))
        lengths = [len(item.tokens) for item in items.values()]
        canary, longest = next(iter(items.values())).tokens.tolist(), max(lengths)
        with open_target(project, context, recipe, servers, canary, longest) as target, way:
            capture_served(project, context, recipe, target, items, sum(lengths))
        stored = ledger.counts()["stored"].samples
    if stored != len(items):
        raise SystemExit(f"only {stored} of {len(items)} samples were stored")
