"""The prepare stage in a folder, with small tokenizers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.base.seal import seal_faults
from eyas.base.stop import StopFlag
from eyas.config.schema import EyasConfig
from eyas.stages.prepare.work import prepare
from eyas.store.samples import Sample, read_samples
from tests.chat.tokenizers import end_tokens, make_tokenizer

VOCAB_SIZE = 500


def config(sources: list[dict[str, Any]], regenerate: bool = False, new: int = 8, **data: Any) -> EyasConfig:
    return EyasConfig.model_validate(
        {
            "target": {"model": "m"},
            "data": {"sources": sources, "max_seq_len": 200, "validation": 0.0} | data,
            "regenerate": {"enabled": regenerate, "max_new_tokens": new},
        }
    )


def write(root: Path, name: str, records: list[Any]) -> dict[str, Any]:
    path = root / name
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return {"path": name}


def run(
    root: Path, settings_: EyasConfig, template: str = "chatml", stop: StopFlag | None = None
) -> dict[str, Any]:
    return prepare(
        settings_,
        Layout(root),
        make_tokenizer(template),
        end_tokens(template),
        VOCAB_SIZE,
        SilentProgress(),
        stop or StopFlag(),
    )


def samples(root: Path) -> list[Sample]:
    assert seal_faults(Layout(root).samples) == []
    return list(read_samples(Layout(root).samples))


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]} | fields


def add_up(statistics: dict[str, Any]) -> None:
    assert statistics["records"] == statistics["kept"] + sum(statistics["dropped"].values())
    for parts in (statistics["sources"], statistics["domains"]):
        for key in ("records", "kept", "tokens", "supervised_tokens", "prompts", "turns"):
            assert statistics[key] == sum(part[key] for part in parts.values()), key
        for key in ("dropped", "samples_dropped", "conversations", "samples"):
            names = set(statistics[key]).union(*(part[key] for part in parts.values()))
            for name in names:
                expected = statistics[key].get(name, 0)
                assert expected == sum(part[key].get(name, 0) for part in parts.values()), (key, name)
        for part in parts.values():
            assert part["records"] == part["kept"] + sum(part["dropped"].values())
