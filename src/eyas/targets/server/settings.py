"""The client's settings with everything looked up: key, certificates, where dumps lie."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.errors import ConfigError
from eyas.config.schema import EyasConfig


@dataclass(frozen=True)
class ClientSettings:
    """How servers are reached; see `eyas.config.servers.ClientConfig` for the meaning of each.

    ``away_seconds``: how long a server that somebody else runs may be away before it is given up.
    """

    api_key: str = field(default="", repr=False)
    verify: ssl.SSLContext | bool = True
    tokens_in_flight: int = 16384
    requests_in_flight: int = 256
    connect_seconds: float = 10.0
    first_byte_seconds: float = 300.0
    dump_seconds: float = 60.0
    answer_seconds: float = 1800.0
    away_seconds: float = 900.0

    @classmethod
    def of(cls, config: EyasConfig, root: Path) -> ClientSettings:
        """Read key and certificates that the configuration names.

        Args:
            root: project folder, from which relative paths count.

        Raises:
            ConfigError: the certificates cannot be read, or the key's variable is not set.
        """
        serve, client = config.serve, config.client
        return cls(
            api_key=read_api_key(serve.api_key_env),
            verify=_trust(serve.ca_file, root),
            tokens_in_flight=client.tokens_in_flight,
            requests_in_flight=client.requests_in_flight,
            connect_seconds=client.connect_seconds,
            first_byte_seconds=client.first_byte_seconds,
            dump_seconds=client.dump_seconds,
            answer_seconds=client.answer_seconds,
            away_seconds=serve.start_seconds,
        )


def read_api_key(variable: str) -> str:
    """The API key in an environment variable; empty when none is named.

    Raises:
        ConfigError: the variable is not set.
    """
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(
            f"the environment variable {variable} is not set",
            where="serve.api_key_env",
            hint=f"export {variable}=KEY",
        )
    return key


def _trust(ca_file: str, root: Path) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    path = (root / Path(ca_file).expanduser()).resolve()
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "the certificates cannot be read", where=path, why=str(error), hint="set serve.ca_file"
        ) from error
