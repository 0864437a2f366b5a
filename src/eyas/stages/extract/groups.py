"""Which samples are captured together: all at once, or wave by wave when the store has a bound.

Batches are planned within a group, over all of it, so that a group that is captured again after a crash, or
for another epoch, comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from eyas.base.errors import ConfigError
from eyas.base.files import tree_bytes
from eyas.base.units import format_bytes
from eyas.stages.extract.left import Left
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.room import project_room
from eyas.stages.waves import wave_rule
from eyas.store.entry import SampleEntry
from eyas.store.listing import Listing, read_listing
from eyas.store.release import recall_released
from eyas.store.wave_record import waves_over
from eyas.store.waves import WavePlan, WaveRule, plan_waves


def groups_to_capture(project: Project, context: RunContext, listing: Listing) -> Iterator[Left]:
    """Samples that belong together, in the order in which they are captured.

    With a bound: the samples that stay, then the waves that may be on disk now; with a feed all waves, each
    as soon as training has made room for it.

    Raises:
        ConfigError: the bound is too small for the data, or something lies in the store that belongs to no
            wave and leaves no room for one.
        Stopped: a stop was asked for while waiting for room.
    """
    batch_tokens, ledger = project.config.extract.batch_tokens, context.ledger
    rule = wave_rule(project)
    if rule is None:
        if recall_released(ledger):
            listing = read_listing(ledger)
        yield Left.of("", listing, batch_tokens)
        return
    entries = list(ledger.entries())
    plan = plan_waves(entries, rule)
    sizes = _Sizes(project, rule, entries)
    kept = Left.of(" of samples that stay", listing, batch_tokens, plan.kept)
    sizes.require(kept)
    yield kept
    if context.feed is None:
        yield from _that_fit(project, context, plan, sizes)
        return
    for number in range(waves_over(project.layout, plan.digest), len(plan)):
        if context.feed.await_room(number, context.stop) is None:
            return
        yield sizes.checked(_wave(project, context, plan, number))


def _that_fit(project: Project, context: RunContext, plan: WavePlan, sizes: _Sizes) -> Iterator[Left]:
    """Waves that may be on disk now. One beyond the first is left for later when the disk has no room for it:
    training the first makes some."""
    position = waves_over(project.layout, plan.digest)
    for place, number in enumerate(plan.on_disk(position)):
        context.stop.check()
        left = _wave(project, context, plan, number)
        room = project_room(project, context.progress, context.stop)
        if place and room.writable_bytes() < sizes.left_bytes(left):
            context.progress.say(f"no room yet for wave {number + 1}: it is captured after the one before it")
            return
        yield sizes.checked(left)


def _wave(project: Project, context: RunContext, plan: WavePlan, number: int) -> Left:
    name = f" of wave {number + 1} of {len(plan)}"
    # read anew: what training has released since, or needs again, is another state
    listing = read_listing(context.ledger)
    return Left.of(name, listing, project.config.extract.batch_tokens, plan.waves[number].ids)


class _Sizes:
    """What is still to be written, against the bound."""

    def __init__(self, project: Project, rule: WaveRule, entries: list[SampleEntry]) -> None:
        self._store, self._rule = project.layout.store, rule
        self._bytes = {entry.id: rule.sample_bytes(entry) for entry in entries}

    def left_bytes(self, left: Left) -> int:
        """Bytes that the samples still to be captured take, at most."""
        return sum(self._bytes[name] for name in left.listing.left())

    def checked(self, left: Left) -> Left:
        self.require(left)
        return left

    def require(self, left: Left) -> None:
        """Raise ConfigError when they would take the store beyond its bound; waiting would not help."""
        needed, used = self.left_bytes(left), tree_bytes(self._store)
        if needed and needed + used > self._rule.max_bytes:
            raise ConfigError(
                f"{format_bytes(needed)} have to be captured, the store holds {format_bytes(used)} already",
                where=self._store,
                why=f"store.max_bytes is {format_bytes(self._rule.max_bytes)}, and something lies there that "
                "belongs to no wave",
                hint="eyas store gc lists what may go; eyas run --redo extract sets the store aside",
            )
