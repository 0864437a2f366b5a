"""``eyas serve patch status | apply | restore``: edits of an engine's source."""

from __future__ import annotations

from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json, table
from eyas.targets.serving.patches import Patches, PatchView


def status(
    *,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Where each edit declared in serve.patches stands, by the hash of the engine's file."""
    patches = _patches(common)
    return _print([patches.look(name) for name in patches.names()], common)


def apply(
    name: str = "",
    *,
    dry_run: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Apply declared edits; the file's hash is compared before and after, the original is kept.

    Args:
        name: the patch; all of them when left out.
        dry_run: say where each stands and change nothing.
    """
    patches = _patches(common)
    change = patches.look if dry_run else patches.apply
    return _print([change(one) for one in ([name] if name else patches.names())], common)


def restore(
    name: str = "",
    *,
    dry_run: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Put the originals back; the file's hash is compared before and after.

    Args:
        name: the patch; all of them when left out.
        dry_run: say where each stands and change nothing.
    """
    patches = _patches(common)
    change = patches.look if dry_run else patches.restore
    return _print([change(one) for one in ([name] if name else patches.names())], common)


def _patches(common: Common) -> Patches:
    project = common.open()
    return Patches(project.config.serve, project.layout.root, project.layout.state / "patches")


def _print(views: list[PatchView], common: Common) -> int:
    if common.json:
        print_json({"patches": [view.as_dict() for view in views]})
        return 0
    if not views:
        note("no patch is declared in serve.patches")
        next_command(None)
        return 0
    table(
        None,
        ["patch", "state", "file", "version"],
        [[v.name, v.state, v.path or "-", v.version] for v in views],
    )
    states = {view.state for view in views}
    if states & {"drifted", "missing"}:
        next_command("look at serve.patches: the engine's file is not the one that was declared")
    elif "not applied" in states:
        next_command(f"eyas serve patch apply{common.suffix}")
    else:
        next_command(f"eyas serve patch restore{common.suffix}, when the engine no longer needs it")
    return 0
