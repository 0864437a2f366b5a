"""Small projects on a tiny random target, and what to compare two of them by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from eyas.base.layout import Layout
from eyas.store.ledger import Ledger
from eyas.store.reader import StoreReader
from tests.tiny import save_tiny_target

WORDS = [
    "rain",
    "bird",
    "hill",
    "river",
    "stone",
    "cloud",
    "north",
    "seven",
    "green",
    "morning",
    "letter",
    "boat",
]

CONFIG = """
format = 1
[target]
model = "{model}"
dtype = "{dtype}"
device = "cpu"
[data]
max_seq_len = 128
validation = 0.25
[[data.sources]]
path = "{data}"
[regenerate]
max_new_tokens = 12
batch_size = 4
[extract]
batch_tokens = 160
[store]
dtype = "{dtype}"
segment_mib = 1
segment_seconds = 0.05
[train]
epochs = 2
batch_tokens = 160
steps = 3
lr = 1e-3
dtype = "{dtype}"
checkpoint_minutes = 0.0005
validations = 2
[evaluate]
max_new_tokens = 8
batch_size = 4
timing_prompts = 1
{more}
"""


def tiny_target(folder: Path, kind: str = "llama") -> Path:
    """A random target with a tokenizer and chat template, made once per folder."""
    if not (folder / "config.json").exists():
        save_tiny_target(folder, kind=kind)
    return folder


def write_prompts(path: Path, count: int) -> Path:
    """Prompts of one and two turns, all different."""
    lines = []
    for i in range(count):
        turns = [f"tell {WORDS[i % len(WORDS)]} {i} about the {WORDS[(i * 5 + 1) % len(WORDS)]}"]
        if i % 3 == 0:
            turns.append("make it shorter")
        lines.append(json.dumps({"turns": turns, "domain": "even" if i % 2 == 0 else "odd"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_project(root: Path, model: Path, *, count: int = 10, more: str = "", dtype: str = "float32") -> Path:
    """A project folder that runs through in about a second."""
    root.mkdir(parents=True)
    data = write_prompts(root / "prompts.jsonl", count)
    (root / "eyas.toml").write_text(CONFIG.format(model=model, data=data.name, more=more, dtype=dtype))
    return root


def store_content(root: Path) -> dict[str, str]:
    """Hash of the states of every stored sample, read through the store with checksums checked."""
    layout = Layout(root)
    with Ledger.open_read_only(layout.ledger) as ledger:
        reader = StoreReader(layout.segments, ledger)
        content = {}
        for name in reader.ids():
            sample = reader.sample(name, check=True)
            digest = hashlib.sha256(sample.tokens.tobytes())
            digest.update(sample.aux.raw())
            digest.update(sample.last.raw())
            content[name] = digest.hexdigest()
    return content


def weights_digest(root: Path) -> str:
    """Hash of the finished weights."""
    folders = sorted((root / "drafter" / "checkpoints").glob("step-*"))
    return hashlib.sha256((folders[-1] / "model.safetensors").read_bytes()).hexdigest()


def measured(root: Path) -> dict[str, Any]:
    """What evaluation found, without times."""
    report = dict(json.loads((root / "reports" / "evaluation.json").read_text()))
    return {key: report[key] for key in ("acceptance_length", "rounds", "accepted", "lossless")}


def outcome(root: Path) -> dict[str, Any]:
    """Everything that has to be the same after any number of interruptions."""
    return {"store": store_content(root), "weights": weights_digest(root), "measured": measured(root)}
