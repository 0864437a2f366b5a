"""What a server is started with: command, environment, settings of the plugin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import ConfigError
from eyas.base.hashing import recipe_hash
from eyas.base.units import parse_bytes
from eyas.config.resolve import Resolved
from eyas.config.schema import EyasConfig
from eyas.config.server_arguments import Engine, Mode, engine_of, mode_arguments, words

HOST = "127.0.0.1"
SETTINGS_VARIABLE = "EYAS_ENGINE_SETTINGS"
"""Where the plugin looks for its settings; the same text stands in `eyas_engine.settings`."""

_MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}


@dataclass(frozen=True)
class Launch:
    """How servers of one mode are started; what differs between replicas is added at the start.

    ``digest`` tells servers apart that were started with something else.
    """

    engine: Engine
    mode: Mode
    model: str
    min_length: int
    layers: tuple[int, ...]
    num_layers: int
    arguments: dict[str, Any]
    start_words: tuple[str, ...]
    environment: dict[str, str]
    replica_environment: tuple[dict[str, str], ...]
    limit_bytes: int
    digest: str

    def command(self, port: int, settings: Mapping[str, Any] | None) -> list[str]:
        """The whole command line; ``settings`` are the plugin's, in mode ``capture``."""
        arguments: dict[str, Any] = {"host": HOST, "port": port, **self.arguments}
        if settings is not None and self.engine == "vllm":
            arguments["kv-transfer-config"] = {
                "kv_connector": "EyasConnector",
                "kv_connector_module_path": "eyas_engine.vllm_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"eyas": dict(settings)},
            }
        return [*self.start_words, *words(arguments)]

    def variables(
        self, index: int, settings: Mapping[str, Any] | None, plugin: Path | None
    ) -> dict[str, str]:
        """The environment of replica ``index``: this process', then the tables', then the plugin's."""
        variables = {**os.environ, **self.environment}
        if self.replica_environment:
            variables |= self.replica_environment[index]
        if settings is not None and plugin is not None:
            path = [str(plugin), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
            variables[SETTINGS_VARIABLE] = json.dumps(settings)
            allowed = variables.get("SGLANG_PLUGINS", "")
            if allowed and "eyas" not in allowed.split(","):
                variables["SGLANG_PLUGINS"] = f"{allowed},eyas"
        return variables

    def settings(self, dump_dir: Path, server_started: str) -> dict[str, Any]:
        """What the plugin is told."""
        return {
            "directory": str(dump_dir),
            "layers": list(self.layers),
            "num_layers": self.num_layers,
            "server_started": server_started,
            "limit_bytes": self.limit_bytes,
        }


def plan_launch(config: EyasConfig, resolved: Resolved, mode: Mode, drafter: Path | None) -> Launch:
    """Derive how servers of ``mode`` are started.

    Raises:
        ConfigError: a table contradicts what eyas decides, or mode ``draft`` has no drafter.
    """
    serve, engine = config.serve, engine_of(config)
    if mode == "draft" and (drafter is None or not (drafter / "config.json").is_file()):
        raise ConfigError(
            "there is no exported drafter to serve", where=drafter or "exports/", hint="eyas run exports one"
        )
    arguments = mode_arguments(config, resolved, mode, drafter)
    start_words = tuple(serve.command) or (serve.python or sys.executable, "-m", _MODULES[engine])
    started_with = {
        "engine": engine,
        "mode": mode,
        "arguments": arguments,
        "start": list(start_words),
        "environment": serve.environment,
        "replica_environment": list(serve.replica_environment),
        "layers": list(resolved.aux_layers) if mode == "capture" else [],
        "dump": [serve.dump_dir, serve.dump_limit] if mode == "capture" else [],
    }
    return Launch(
        engine=engine,
        mode=mode,
        model=str(resolved.model),
        min_length=config.data.max_seq_len,
        layers=resolved.aux_layers,
        num_layers=resolved.facts.num_layers,
        arguments=arguments,
        start_words=start_words,
        environment=dict(serve.environment),
        replica_environment=serve.replica_environment,
        limit_bytes=parse_bytes(serve.dump_limit) if serve.dump_limit else 0,
        digest=recipe_hash(started_with),
    )
