"""The target behind servers, as regenerate and extract open it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from eyas.base.errors import ConfigError, ServerNotStarted, ServerUnreachable
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.threads import set_threads
from eyas.store.recipe import StoreRecipe
from eyas.targets.dtype import torch_dtype
from eyas.targets.server.capturing import Canary, CaptureRules
from eyas.targets.server.heads import Heads
from eyas.targets.server.reference import make_reference
from eyas.targets.server.replica import Keeper
from eyas.targets.server.settings import ClientSettings
from eyas.targets.server.target import ServedAnswers, ServedTarget
from eyas.targets.serving.manager import Mode, Servers

CANARY_TOKENS = 64
"""Tokens of a real sample that the canary takes."""

FIND_TRIES = 3
"""How often a server that somebody else runs is asked what it is."""


def is_served(project: Project) -> bool:
    """Whether tokens and states come from servers."""
    return project.config.target.kind != "local"


def served_dtype(project: Project, recorded: str | None) -> str:
    """The arithmetic of servers: as configured, as recorded, or what the model's configuration says.

    The last is what engines take when they are not told; the canary's dump shows whether it is so.

    Raises:
        ConfigError: the dtype is unknown.
    """
    wanted = project.config.target.dtype
    if wanted != "auto":
        return wanted
    found = recorded or project.resolved.facts.dtype
    try:
        torch_dtype(found)
    except ConfigError as error:
        raise ConfigError(
            f"the target's config.json says dtype {found!r}, which eyas does not know",
            where=project.resolved.model,
            hint="set target.dtype to what the servers compute in",
        ) from error
    return found


@contextmanager
def capture_target(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    canary_tokens: Sequence[int],
    longest: int,
) -> Iterator[ServedTarget]:
    """Servers set up for extraction, proven; ended or left alone afterwards as their keeper does.

    Raises:
        ServerUnreachable, TargetError, ConfigError: no server can be had.
        Stopped: a signal came.
    """
    with (
        open_keeper(project, context, "capture") as keeper,
        open_target(project, context, recipe, keeper, canary_tokens, longest) as target,
    ):
        yield target


@contextmanager
def open_target(
    project: Project,
    context: RunContext,
    recipe: StoreRecipe,
    keeper: Keeper,
    canary_tokens: Sequence[int],
    longest: int,
) -> Iterator[ServedTarget]:
    """The client of servers that somebody keeps, proven; see `capture_target`."""
    set_threads(project)
    settings = ClientSettings.of(project.config, project.layout.root)
    rules = CaptureRules(
        project.resolved.facts,
        recipe.aux_layers,
        torch_dtype(recipe.compute_dtype),
        torch_dtype(project.config.store.dtype),
    )
    model = project.resolved.model
    tokens = tuple(int(token) for token in canary_tokens[:CANARY_TOKENS])
    trust = project.config.target.trust_remote_code
    canary = Canary(tokens, make_reference(model, tokens, trust_remote_code=trust))
    heads = Heads.load(model)
    root, say = project.layout.root, context.progress.say
    with ServedTarget(keeper, rules, canary, heads, model, settings, longest, root, say) as target:
        target.open(context.stop)
        yield target


@contextmanager
def answering_target(project: Project, context: RunContext, probe: Sequence[int]) -> Iterator[ServedAnswers]:
    """Plain servers, proven; see `capture_target`."""
    settings = ClientSettings.of(project.config, project.layout.root)
    with (
        open_keeper(project, context, "generate") as keeper,
        ServedAnswers(
            keeper,
            project.resolved.facts,
            settings,
            probe,
            project.config.regenerate.batch_size,
            project.layout.root,
            context.progress.say,
        ) as answers,
    ):
        answers.open(context.stop)
        yield answers


@contextmanager
def open_keeper(project: Project, context: RunContext, mode: Mode) -> Iterator[Keeper]:
    """Start the servers, or find those that run.

    Raises:
        ServerUnreachable, TargetError, ConfigError: they do not come up, or as something else.
        Stopped: a signal came.
    """
    with _open_servers(project, context, mode) as servers:
        yield servers


def _open_servers(project: Project, context: RunContext, mode: Mode) -> Servers:
    """`Servers.open`; one bad reply of a server that runs already ends no run."""
    for left in reversed(range(FIND_TRIES)):
        try:
            return Servers.open(
                project.config,
                project.layout.root,
                mode,
                log_folder=project.layout.logs / f"attempt-{context.attempt:04d}",
                stop=context.stop,
                say=context.progress.say,
            )
        except ServerNotStarted:
            raise
        except ServerUnreachable as error:
            if not left or not project.config.serve.urls:
                raise
            context.progress.say(f"asking again: {error.what} ({error.why})")
            context.stop.check()
    raise AssertionError("unreachable")
