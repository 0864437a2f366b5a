"""``eyas config show``: every value in force and what follows from it."""

from __future__ import annotations

import shlex
from typing import Any

from eyas.cli.common import Common
from eyas.cli.output import next_command, print_json, table
from eyas.config.meanings import meanings_of
from eyas.config.schema import EyasConfig
from eyas.config.section import Section
from eyas.config.server_arguments import MODES, mode_arguments, words
from eyas.config.servers import ServeConfig
from eyas.stages.project import Project


def show(
    *,
    defaults: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Every value in force, with its reason.

    Args:
        defaults: show all keys with their defaults and meaning instead; needs no project.
    """
    if defaults:
        rows = [list(row) for row in documented_keys()]
        if common.json:
            print_json({"keys": [{"key": k, "default": d, "meaning": m} for k, d, m in rows]})
        else:
            table(None, ["key", "default", "meaning"], rows)
        return 0
    project = common.open()
    resolved = project.resolved
    servers = _servers(project)
    if common.json:
        print_json(
            {
                "config": project.config.model_dump(mode="json"),
                "target": resolved.facts.as_dict(),
                "derived": [{"key": d.key, "value": d.value, "reason": d.reason} for d in resolved.derived],
                "servers": servers,
            }
        )
        return 0
    given = project.config.model_dump(mode="json", exclude_defaults=True)
    table("from eyas.toml and --set", ["key", "value"], [[k, str(v)] for k, v in _flat(given)])
    table("derived", ["key", "value", "reason"], [[d.key, str(d.value), d.reason] for d in resolved.derived])
    if servers:
        rows = [[mode, shlex.join(line)] for mode, line in servers.items()]
        table("servers (address, port and dump folder are added at the start)", ["mode", "arguments"], rows)
    next_command(f"eyas run --dry-run{common.suffix}")
    return 0


def _servers(project: Project) -> dict[str, list[str]]:
    """Arguments of servers by mode; none for a project that has nothing to do with servers."""
    config = project.config
    if config.target.kind == "local" and config.serve == ServeConfig():
        return {}
    return {mode: words(mode_arguments(config, project.resolved, mode)) for mode in MODES}


def documented_keys() -> list[tuple[str, str, str]]:
    """Key, default and meaning of everything that may stand in ``eyas.toml``."""
    return list(_walk(EyasConfig, ""))


def _walk(section: type[Section], prefix: str) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    meanings = meanings_of(section)
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            many = field.annotation is not inner
            rows += _walk(inner, f"{prefix}{name}{'[]' if many else ''}.")
            continue
        default = "required" if field.is_required() else repr(field.default)
        rows.append((f"{prefix}{name}", default, meanings.get(name, "")))
    return rows


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _flat(table_: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in table_.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows
