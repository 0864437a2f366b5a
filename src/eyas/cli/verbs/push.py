"""``eyas push``: the project and exactly this eyas on another machine."""

from __future__ import annotations

from eyas.base.errors import HostUnreachable, UsageError
from eyas.base.units import counted
from eyas.cli.common import Common
from eyas.cli.output import next_command, note, print_json
from eyas.hosts.declared import declared, open_host
from eyas.hosts.push import command, project_files, project_place
from eyas.hosts.push import push as send


def push(
    *,
    run: bool = False,
    dry_run: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Put configuration, data and this eyas on the host named by --host; only what differs is sent.

    A file that is there otherwise is moved to set-aside/ there first. The store stays where it is.

    Args:
        run: then start eyas run there in the background; it outlives the connection.
        dry_run: list what belongs there and send nothing.
    """
    if common.host is None:
        raise UsageError(
            "push needs a host", hint="eyas push --host NAME, declared in eyas.toml as [[hosts]]"
        )
    project = common.open()
    spec = declared(project.config, common.host)
    place = project_place(spec)
    if dry_run:
        names = project_files(project.layout.root, project.config)
        if common.json:
            print_json({"host": spec.name, "project": place, "files": names})
        else:
            print("\n".join(names))
            next_command(f"eyas push{common.suffix}")
        return 0
    say = (lambda text: None) if common.json else note
    host = open_host(spec)
    done = send(host, spec, project.layout.root, project.config, say)
    started = ""
    if run:
        words = ["run", "--project", place, "--detach"]
        result = host.run(command(spec, done.eyas, words), timeout_seconds=300.0)
        if not result.ok:
            raise HostUnreachable(
                f"eyas run did not start on {spec.name}",
                where=place,
                why=result.err.strip() or result.explain(),
            )
        started = "running in the background there"
    if common.json:
        print_json(done.__dict__ | {"started": run})
        return 0
    for name in done.set_aside:
        note(f"{name} was different there: moved to set-aside/ there")
    note(f"{spec.name}:{done.project}: {counted(len(done.sent), 'file')} sent, {len(done.kept)} were there")
    if started:
        note(started)
    then = "logs --follow" if run else "run --detach"
    next_command(f"eyas {then}{common.suffix}")
    return 0
