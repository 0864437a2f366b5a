"""Servers of an engine: how they are started, edited and asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from eyas.config.section import Positive, Seconds, Section, Size


def _server_table(table: dict[str, Any]) -> dict[str, Any]:
    for key, value in table.items():
        simple = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, bool | int | float | str | dict) for entry in simple):
            raise ValueError(
                f"{key}: an argument is text, a number, true, false, a list of these, or a table"
            )
    return table


ServerTable = Annotated[dict[str, Any], AfterValidator(_server_table)]
"""Arguments of a server by name: ``true`` is a bare flag, ``false`` leaves one out, a list gives
several words, a table is passed as JSON."""


class PatchConfig(Section):
    """An edit of an engine's source that a target needs, kept as a unified diff."""

    name: str
    """What it is called in ``eyas serve patch``."""
    package: str
    """Package in the engine's environment, as it is imported."""
    file: str
    """File within the package."""
    diff: str
    """The unified diff, relative to the project folder unless absolute."""
    sha256_before: str
    """SHA-256 of the file that the diff was made for."""
    sha256_after: str
    """SHA-256 of the file with the diff applied."""


class ServeConfig(Section):
    """Servers of the target: how they are started, found and stopped."""

    engine: Literal["auto", "vllm", "sglang"] = "auto"
    """What serves; ``auto`` is ``target.kind``, or vLLM when that is ``local``."""
    python: str = ""
    """Python of the engine's environment; empty: the one that runs eyas."""
    command: tuple[str, ...] = ()
    """Words that start the engine, before its arguments; empty: its module, run by ``python``."""
    replicas: Positive = 1
    """Servers that share the work."""
    urls: tuple[str, ...] = ()
    """Servers that somebody else started and stops; with these, eyas starts none."""
    last_urls: tuple[str, ...] = ()
    """Beside each SGLang server of ``urls`` that cannot load eyas' plugin and returns aux states as JSON, one
    that returns last states."""
    model_name: str = ""
    """What the servers of ``urls`` call the target; empty: the name of its folder."""
    args: ServerTable = Field(default={})
    """Arguments in every mode, as in ``{ "tensor-parallel-size" = 8 }``."""
    args_generate: ServerTable = Field(default={})
    """Arguments of servers that answer prompts."""
    args_capture: ServerTable = Field(default={})
    """Arguments of servers that capture states."""
    args_draft: ServerTable = Field(default={})
    """Arguments of servers that serve an exported drafter."""
    environment: dict[str, str] = Field(default={})
    """Environment variables of a server."""
    replica_environment: tuple[dict[str, str], ...] = ()
    """Variables of each replica, in order, as ``CUDA_VISIBLE_DEVICES``; one table a replica."""
    dump_dir: str = ""
    """Where servers put captured states for eyas to take; empty: shared memory, or ``state/``."""
    dump_limit: Size | None = None
    """Most bytes of states that wait to be taken from one server; none: as the filesystem has."""
    start_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long a server may take until it answers; a model of 1T parameters takes 11 minutes."""
    stop_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long a server may take to end before it is killed."""
    api_key_env: str = ""
    """Environment variable that holds the servers' API key."""
    ca_file: str = ""
    """Certificates to trust for ``https`` in ``urls``."""
    patches: tuple[PatchConfig, ...] = ()
    """Edits of the engine's source, for ``eyas serve patch``."""

    @property
    def every_url(self) -> tuple[str, ...]:
        """All servers that somebody else runs."""
        return (*self.urls, *self.last_urls)

    @model_validator(mode="after")
    def _replicas_fit(self) -> ServeConfig:
        if self.replica_environment and len(self.replica_environment) != self.replicas:
            raise ValueError(
                f"serve.replica_environment has {len(self.replica_environment)} tables for "
                f"{self.replicas} replicas"
            )
        if self.last_urls and len(self.last_urls) != len(self.urls):
            raise ValueError(
                f"serve.last_urls has {len(self.last_urls)} servers, one beside each of the {len(self.urls)} "
                "of serve.urls is needed"
            )
        return self


class ClientConfig(Section):
    """How servers are asked for states and answers, and how patient eyas is with them."""

    tokens_in_flight: Positive = 16384
    """Prompt tokens sent to one server and not yet taken into the store."""
    requests_in_flight: Positive = 256
    """Most requests that one server has at a time."""
    connect_seconds: Seconds = 10.0
    """Patience with a connection."""
    first_byte_seconds: Seconds = 300.0
    """Patience with the reply to a captured prompt."""
    dump_seconds: Seconds = 60.0
    """Patience with a dump after its reply; within twice this time it is late, and taken."""
    answer_seconds: Seconds = 1800.0
    """Patience with a whole answer."""
