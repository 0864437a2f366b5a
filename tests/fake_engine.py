"""The fake server behind vLLM's command line, so that eyas starts, proves, watches and kills it as an engine.

The environment orders faults: FAKE_FAULTS, as ``eyas serve fake --fault`` has them, separated by commas;
they count in mode capture only. It is a process of its own, and loads the model that ``--model`` names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from eyas.targets.fake.dumps import TinyModel
from eyas.targets.fake.faults import parse_fault
from eyas.targets.fake.server import FakeServer
from eyas.targets.fake.settings import FakeSettings
from eyas.targets.local.model import LocalTarget


class EngineServer(FakeServer):
    """The fake server in a dump folder that eyas made: its owner file stays as it is."""

    def _write_owner(self, folder: Path) -> None:
        pass


def main(words: list[str]) -> None:
    given = {words[i].removeprefix("--"): words[i + 1] for i in range(len(words) - 1)}
    transfer = json.loads(given.get("kv-transfer-config", "{}"))
    told = transfer.get("kv_connector_extra_config", {}).get("eyas")
    model = Path(given["model"])
    ordered = [text for text in os.environ.get("FAKE_FAULTS", "").split(",") if text and told]
    settings = FakeSettings(
        engine="vllm",
        mode="capture" if told else "generate",
        model_folder=model,
        dump_folder=Path(told["directory"]) if told else None,
        faults=tuple(parse_fault(text) for text in ordered),
        model_name=given["model"],
        process_dies=True,
    )
    target = LocalTarget.load(model, "cpu", given.get("dtype", "float32"))
    layers = told["layers"] if told else target.facts.default_aux_layers()
    server = EngineServer(TinyModel(target, layers, before_norm=True), settings, port=int(given["port"]))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"serving on {server.url}", flush=True)
    ended.wait()
    server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
