"""Extraction through a server beside the same kind of server's own prefill, on the same prompts."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
SERVE = {
    "vllm": """
[serve]
python = "{python}"
start_seconds = 1800
[serve.args]
enforce-eager = true
[serve.environment]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_NO_USAGE_STATS = "1"
OMP_NUM_THREADS = "1"
HF_HUB_OFFLINE = "1"
""",
    "sglang": """
[serve]
python = "{python}"
start_seconds = 1800
[serve.args]
device = "cpu"
attention-backend = "torch_native"
sampling-backend = "pytorch"
grammar-backend = "none"
disable-radix-cache = true
disable-overlap-schedule = true
disable-cuda-graph = true
skip-server-warmup = true
max-total-tokens = 16384
mem-fraction-static = 0.3
[serve.environment]
SGLANG_USE_CPU_ENGINE = "1"
PYTHONPATH = "{standins}:{beside}"
OMP_NUM_THREADS = "1"
HF_HUB_OFFLINE = "1"
""",
}
"""Servers on a CPU; ``--serve FILE`` gives another ``[serve]`` table."""


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
    parser.add_argument("--in-flight", type=int, default=4096, help="client.tokens_in_flight, of both")
    parser.add_argument("--dtype", default="float32", help="arithmetic of the servers")


def measure(name: str, engine: str, limit: float, arguments: argparse.Namespace) -> dict[str, object]:
    """Both servers run; rounds of capture into a new store and of bare prefill take turns.

    Bare prefill is the same requests without a dump to a plain server: one token each, as many tokens in
    flight. Capture is the stage's own code, from the first request to the last commit.
    """
    if not (arguments.model / "config.json").is_file():
        raise SystemExit(f"there is no target in {arguments.model}: make demo, or give --model FOLDER")
    if not Path(arguments.python).exists():
        raise SystemExit(f"there is no engine at {arguments.python}: make servers, or give --python")
    from eyas.targets.serving.manager import Servers

    samples = _make_samples(arguments.tokens, arguments.model)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    captured: list[float] = []
    bare: list[float] = []
    cpu: dict[str, list[float]] = {"bare": [], "captured": []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        project = _project(place / "capture", engine, arguments, samples)
        # prompts come again each round, and vLLM would remember them
        no_memory = "no-enable-prefix-caching = true\n" if engine == "vllm" else ""
        plain = _project(place / "plain", engine, arguments, samples, no_memory)
        with (
            Servers.open(
                project.config, project.layout.root, "capture", log_folder=place, say=_say
            ) as capture_servers,
            Servers.open(plain.config, plain.layout.root, "generate", log_folder=place, say=_say) as others,
        ):
            prompts = [sample.tokens.tolist() for sample in samples]
            _bare(
                engine, others.servers[0], prompts[:4], arguments.in_flight
            )  # the first pays for warming up
            for number in range(arguments.rounds):
                before = _cpu_seconds(others.servers[0].pid)
                seconds = _bare(engine, others.servers[0], prompts, arguments.in_flight)
                bare.append(num_tokens / seconds)
                cpu["bare"].append(num_tokens / (_cpu_seconds(others.servers[0].pid) - before))
                before = _cpu_seconds(capture_servers.servers[0].pid)
                seconds = _capture(project, capture_servers, number)
                captured.append(num_tokens / seconds)
                cpu["captured"].append(num_tokens / (_cpu_seconds(capture_servers.servers[0].pid) - before))
                _say(f"round {number + 1}: prefill {bare[-1]:,.0f}, extraction {captured[-1]:,.0f} tokens/s")
    ratio = max(captured) / max(bare)
    return {
        "name": name,
        "value": round(max(captured), 1),
        "unit": "tokens/s",
        "baseline": round(max(bare), 1),
        "ratio": round(ratio, 3),
        "details": {
            "baseline_is": f"the same prompts, one token each, on a plain {engine} server",
            "limit": limit,
            "within_limit": ratio >= limit,
            "tokens": num_tokens,
            "samples": len(samples),
            "dtype": arguments.dtype,
            "model": arguments.model.name,
            "prefill_tokens_per_second": [round(rate, 1) for rate in bare],
            "extract_tokens_per_second": [round(rate, 1) for rate in captured],
            "ratio_by_cpu_seconds_of_the_server": round(max(cpu["captured"]) / max(cpu["bare"]), 3),
        },
    }


def _cpu_seconds(pid: int | None) -> float:
    """CPU seconds of a server's processes so far; steadier than the clock beside other work."""
    if pid is None:
        raise SystemExit("the server is not one that this benchmark started")
    root = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in [root, *root.children(recursive=True)])


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _make_samples(num_tokens: int, model: Path) -> list[Any]:
    """Random tokens in lengths as chats have them; two thirds of each are an answer."""
    import numpy as np

    from eyas.config.target_facts import read_target_facts
    from eyas.store.samples import Sample, sample_id

    vocab_size = read_target_facts(model).vocab_size
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    while sum(len(sample.tokens) for sample in samples) < num_tokens:
        length = int(np.clip(random.lognormal(5.3, 0.7), 24, 1024))
        tokens = random.integers(0, vocab_size, length).astype(np.int32)
        spans, name = ((length // 3, length),), f"random-{len(samples)}"
        samples.append(
            Sample(
                sample_id(tokens, spans), tokens, spans, name, "random", "random", "train", "stop", "given"
            )
        )
    return samples


def _project(
    root: Path, engine: str, arguments: argparse.Namespace, samples: Sequence[Any], more_arguments: str = ""
) -> Any:
    from eyas.base.seal import sealed_folder
    from eyas.stages.project import Project
    from eyas.store.samples import write_samples

    root.mkdir(parents=True)
    text = (
        arguments.serve.read_text()
        if arguments.serve is not None
        else SERVE[engine].format(
            python=arguments.python,
            standins=REPOSITORY / "servers" / "sglang_cpu",
            beside=Path(arguments.python).parents[1] / "sglang-cpu",
        )
    )
    text = text.replace("[serve.args]\n", f"[serve.args]\n{more_arguments}")
    (root / "eyas.toml").write_text(
        f'format = 1\n[target]\nmodel = "{arguments.model.resolve()}"\nkind = "{engine}"\n'
        f'dtype = "{arguments.dtype}"\n[[data.sources]]\npath = "none.jsonl"\n[regenerate]\nenabled = false\n'
        f"[data]\nmax_seq_len = 2048\n[client]\ntokens_in_flight = {arguments.in_flight}\n{text}"
    )
    project = Project.open(root)
    with sealed_folder(project.layout.samples, {"num_samples": len(samples)}) as inside:
        write_samples(inside, samples)
    return project


def _bare(engine: str, server: Any, prompts: Sequence[list[int]], in_flight: int) -> float:
    """Seconds of the same prompts without dumps, longest first under the same budget."""
    from eyas.targets.server.connection import Connection
    from eyas.targets.server.settings import ClientSettings
    from eyas.targets.server.wire import FLAVOURS, Sampling

    async def all_of_them() -> float:
        connection = Connection(server.url, ClientSettings(api_key=server.api_key or ""))
        room, changed = [in_flight], asyncio.Condition()

        async def one(tokens: list[int]) -> None:
            async with changed:
                await changed.wait_for(lambda: room[0] >= len(tokens) or room[0] == in_flight)
                room[0] -= len(tokens)
            sampling = Sampling(1, (), 0.0, 1.0, 0)
            path, body = FLAVOURS[engine].answer(tokens, sampling, server.model, "bare")
            body.pop("rid", None)
            await connection.post(path, body, 600.0)
            async with changed:
                room[0] += len(tokens)
                changed.notify_all()

        started = time.perf_counter()
        await asyncio.gather(*(one(tokens) for tokens in sorted(prompts, key=len, reverse=True)))
        seconds = time.perf_counter() - started
        await connection.close()
        return seconds

    return asyncio.run(all_of_them())


def _capture(project: Any, servers: Any, number: int) -> float:
    """Seconds of the stage's own loop into a new store."""
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
        context = RunContext(ledger, SilentProgress(), StopFlag(), number + 1)
        recipe = capture_recipe(project, "benchmark", served_dtype(project, None))
        lengths = [len(item.tokens) for item in items.values()]
        canary, longest = next(iter(items.values())).tokens.tolist(), max(lengths)
        with open_target(project, context, recipe, servers, canary, longest) as target:
            started = time.perf_counter()
            capture_served(project, context, recipe, target, items, sum(lengths))
            seconds = time.perf_counter() - started
        stored = ledger.counts()["stored"].samples
    if stored != len(items):
        raise SystemExit(f"only {stored} of {len(items)} samples were stored")
    return seconds
