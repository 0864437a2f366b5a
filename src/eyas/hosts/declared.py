"""Hosts as ``eyas.toml`` declares them."""

from __future__ import annotations

from eyas.base.errors import ConfigError
from eyas.config.machines import HostConfig
from eyas.config.schema import EyasConfig
from eyas.hosts.chain import Chain, Inside, Way
from eyas.hosts.host import Here, Host
from eyas.hosts.ssh import Ssh


def declared(config: EyasConfig, name: str) -> HostConfig:
    """The declaration of a host. Raises ConfigError when there is none of that name."""
    for host in config.hosts:
        if host.name == name:
            return host
    known = ", ".join(host.name for host in config.hosts)
    raise ConfigError(
        f"no host is called {name!r}",
        why=f"declared are: {known}" if known else "eyas.toml declares none",
        hint=f'add to eyas.toml: [[hosts]] name = "{name}" and ways = [{{ ssh = "user@machine" }}]',
    )


def open_host(host: HostConfig) -> Host:
    """The machine behind a declaration; nothing is connected yet."""
    ways = [_way(host, number) for number in range(len(host.ways))]
    if len(ways) == 1 and isinstance(ways[0], Here):
        return ways[0]
    return Chain(host.name, [way for way in ways if not isinstance(way, Here)])


def _way(host: HostConfig, number: int) -> Way | Here:
    way = host.ways[number]
    if way.ssh is not None:
        return Ssh(host.name, way.ssh, way.inside, host.connect_seconds)
    return Inside(host.name, way.inside, host.connect_seconds) if way.inside else Here()
