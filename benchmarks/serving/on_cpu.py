"""The ``[serve]`` table of an engine that `make servers` installed, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_TABLE = """
[serve]
python = "{python}"
start_seconds = 1800
{more}
[serve.args]
{args}
[serve.environment]
OMP_NUM_THREADS = "1"
HF_HUB_OFFLINE = "1"
{environment}
"""
_ARGS = {
    "vllm": "enforce-eager = true\n",
    # without sleep-on-idle a server that waits for its turn keeps a core busy
    "sglang": """device = "cpu"
attention-backend = "torch_native"
sampling-backend = "pytorch"
grammar-backend = "none"
disable-radix-cache = true
disable-overlap-schedule = true
disable-cuda-graph = true
skip-server-warmup = true
max-total-tokens = 16384
mem-fraction-static = 0.3
sleep-on-idle = true
""",
}
_ENVIRONMENT = {
    "vllm": """VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_NO_USAGE_STATS = "1"
""",
    "sglang": """SGLANG_USE_CPU_ENGINE = "1"
PYTHONPATH = "{standins}:{beside}"
""",
}


def serve_on_cpu(engine: str, python: Path, *, more: str = "", args: str = "", environment: str = "") -> str:
    """The table as TOML, one OpenMP thread a server.

    Args:
        python: of the environment that holds the engine.
        more, args, environment: further lines of ``[serve]`` and of the two tables in it.
    """
    places = {"standins": REPOSITORY / "servers" / "sglang_cpu", "beside": python.parents[1] / "sglang-cpu"}
    return _TABLE.format(
        python=python,
        more=more,
        args=_ARGS[engine] + args,
        environment=_ENVIRONMENT[engine].format(**places) + environment,
    )
