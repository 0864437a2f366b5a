"""Starting a fake server as ``eyas serve fake`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from eyas.base.errors import UsageError
from eyas.targets.fake.as_json import Returns
from eyas.targets.fake.drafts import FakeDrafting
from eyas.targets.fake.dumps import TinyModel
from eyas.targets.fake.faults import parse_fault, read_schedule
from eyas.targets.fake.server import FakeServer
from eyas.targets.fake.settings import FakeSettings
from eyas.targets.local.model import LocalTarget
from eyas.targets.server.settings import read_api_key


def start_fake(
    model: Path,
    *,
    engine: Literal["vllm", "sglang"],
    mode: Literal["capture", "generate"],
    dump_dir: Path | None,
    returns: Returns,
    aux_layers: Sequence[int],
    port: int,
    name: str,
    dtype: str,
    faults: Sequence[str],
    schedule: Path | None,
    api_key_env: str,
    certificate: Path | None,
    key: Path | None,
    accepts: Sequence[int] = (),
    round_seconds: float = 0.0,
) -> FakeServer:
    """Load a small model and serve it in threads of this process.

    Raises:
        UsageError: a fault is none, or an option lacks its companion.
        TargetError: the model cannot be loaded.
        ConfigError: the API key's variable is not set.
        OSError: the port is taken.
    """
    ordered = [parse_fault(text) for text in faults] + (read_schedule(schedule) if schedule else [])
    if returns and (engine, mode) != ("sglang", "capture"):
        raise UsageError("only SGLang returns states as JSON", hint="give --engine sglang --mode capture")
    if mode == "capture" and dump_dir is None and not returns:
        raise UsageError("a server that captures needs a folder for dumps", hint="give --dump-dir DIR")
    if (certificate is None) != (key is None):
        raise UsageError("https needs both a certificate and its key", hint="give --certificate and --key")
    settings = FakeSettings(
        engine=engine,
        mode=mode,
        model_folder=model.resolve(),
        dump_folder=dump_dir.resolve()
        if dump_dir is not None and mode == "capture" and not returns
        else None,
        returns=returns,
        faults=tuple(ordered),
        model_name=name,
        api_key=read_api_key(api_key_env),
        certificate=certificate,
        key=key,
        process_dies=True,
        drafting=FakeDrafting(max(1, *accepts), tuple(accepts)) if accepts else None,
        round_seconds=round_seconds,
    )
    target = LocalTarget.load(model, "cpu", dtype)
    layers = tuple(aux_layers) or target.facts.default_aux_layers()
    return FakeServer(TinyModel(target, layers, before_norm=engine == "vllm"), settings, port=port)
