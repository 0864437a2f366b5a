"""Projects on the real engines; skipped aloud where these or the small target are missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.targets.serving import projects

REPOSITORY = Path(__file__).parents[2]
THINGS = ["rain", "a bird", "the hill", "a river", "stone", "a cloud", "the north", "a boat"]
TABLES = {
    "vllm": """
[serve.args]
enforce-eager = true
max-num-batched-tokens = 256
[serve.environment]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_NO_USAGE_STATS = "1"
""",
    "sglang": """
[serve.args]
device = "cpu"
attention-backend = "torch_native"
sampling-backend = "pytorch"
grammar-backend = "none"
disable-overlap-schedule = true
disable-cuda-graph = true
skip-server-warmup = true
chunked-prefill-size = 256
max-total-tokens = 8192
mem-fraction-static = 0.3
[serve.environment]
SGLANG_USE_CPU_ENGINE = "1"
""",
}
COMMON_ENVIRONMENT = 'HF_HUB_OFFLINE = "1"\nOMP_NUM_THREADS = "1"\nOMP_WAIT_POLICY = "PASSIVE"\n'


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Python of the engines' environment."""
    place = Path(os.environ.get("EYAS_SERVERS_PYTHON", REPOSITORY / ".servers" / "bin" / "python"))
    if not place.exists():
        skipped = REPOSITORY / ".servers-skipped"
        reason = skipped.read_text().strip() if skipped.is_file() else "make servers installs them"
        pytest.skip(f"no engines here: {reason}")
    return place


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    place = Path(os.environ.get("EYAS_SMOLLM", REPOSITORY / ".models" / "smollm2-135m-instruct"))
    if not (place / "config.json").is_file():
        pytest.skip("the small target is not here: make demo makes it")
    return place


def write_project(root: Path, engine: str, model: Path, python: Path, *, count: int = 10) -> Path:
    """A small project whose servers eyas starts; float32 everywhere."""
    root.mkdir(parents=True)
    lines = [
        json.dumps({"turns": [f"Write two sentences about {THINGS[i % len(THINGS)]} and the number {i}."]})
        for i in range(count)
    ]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (root / "eyas.toml").write_text(
        f'format = 1\n[target]\nmodel = "{model}"\nkind = "{engine}"\ndtype = "float32"\ndevice = "cpu"\n'
        '[data]\nmax_seq_len = 256\nvalidation = 0.4\n[[data.sources]]\npath = "prompts.jsonl"\n'
        "[regenerate]\nmax_new_tokens = 24\nbatch_size = 5\n"
        '[store]\ndtype = "float32"\nsegment_seconds = 0.5\n'
        '[train]\nepochs = 3\nsteps = 3\nbatch_tokens = 512\ndtype = "float32"\nvalidations = 1\n'
        "[evaluate]\nmax_new_tokens = 24\ntiming_prompts = 0\n"
        f'[serve]\npython = "{python}"\ndump_dir = "dumps"\nstart_seconds = 3000\n'
        f"{TABLES[engine]}{COMMON_ENVIRONMENT}"
    )
    return root


def end_servers(root: Path) -> None:
    """End whatever servers a test left."""
    projects.end_all(root)
