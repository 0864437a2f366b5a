"""Extract and train when the store has a bound: wave by wave, in turn or side by side.

Where both want the same cores or GPUs, as with a target in this process, they take turns: the waves that fit
are captured, trained and released, and so on. With servers elsewhere, capture runs in a thread beside
training, one wave ahead, and waits for room. A wave is released only when the checkpoint behind it was read
back and every byte of it hashed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from signal import SIGTERM

from eyas.base.errors import ConfigError, EyasError, NotReady, Stopped
from eyas.base.files import set_aside
from eyas.base.progress import Progress
from eyas.base.seal import is_sealed, seal_faults
from eyas.base.stop import StopFlag
from eyas.base.units import counted, format_bytes, format_count
from eyas.config.schema import EyasConfig
from eyas.hosts.gpus import GpuReader
from eyas.pipeline.handover import Handover
from eyas.pipeline.stale import refuse_stale
from eyas.stages.project import Project
from eyas.stages.protocol import Stage
from eyas.stages.records import checkpoint_folders
from eyas.stages.train.outer import OuterPlace
from eyas.stages.waves import Feed, is_captured, not_captured, wave_rule
from eyas.store.ledger import Ledger
from eyas.store.release import settle
from eyas.store.wave_record import waves_over
from eyas.store.waves import WavePlan, WaveRule, plan_waves

WAVE_STAGES = ("extract", "train")
_LOOK_SECONDS = 0.1

RunOne = Callable[[Stage, StopFlag, Feed | None], None]
"""Runs what is left of a stage, if anything is."""


def can_work_together(config: EyasConfig, gpus: GpuReader) -> bool:
    """Whether capture computes elsewhere than training, so that neither takes the other's place.

    A target in this process does not. Servers that somebody else runs do, and those that eyas starts do
    where training is on the CPU or on a GPU that is named (``target.device = "cuda:7"``): otherwise they
    hold the GPUs that training wants, and are stopped before it as always.
    """
    if config.target.kind == "local":
        return False
    if config.serve.urls or config.target.device == "cpu" or ":" in config.target.device:
        return True
    return not gpus.read()


@dataclass
class WaveRun:
    """The stages of `WAVE_STAGES` that a run has, for a store with a bound.

    Args:
        stages: one of them, or both.
        redo: sets a stage's output aside if that was asked for.
        run_one: does what is left of a stage.
        progress: for what is said between stages.
    """

    project: Project
    ledger: Ledger
    stages: Sequence[Stage]
    redo: Callable[[Stage], None]
    run_one: RunOne
    handover: Handover
    progress: Progress
    stop: StopFlag
    _rule: WaveRule = field(init=False)
    _plan: WavePlan = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {stage.name: stage for stage in self.stages}

    def run(self) -> None:
        """Do what can be done: with both stages all of it, with one what the other has left room for.

        Raises:
            ConfigError: the bound is too small, or training cannot go in waves as it was started.
            RecipeChanged: training began with another recipe.
            Whatever ends a stage.
        """
        rule = wave_rule(self.project)
        assert rule is not None
        for stage in self.stages:
            self.redo(stage)
        if not is_sealed(self.project.layout.samples):
            for stage in self.stages:
                self.run_one(stage, self.stop, None)  # says that it has nothing to read yet
            return
        self._refuse()
        self._rule, self._plan = rule, self._planned(rule)
        self._settle()
        if "train" not in self._by_name:
            self._capture()
        elif "extract" not in self._by_name:
            self._train_what_is_there()
        elif can_work_together(self.project.config, self.handover.gpus):
            self._side_by_side()
        else:
            self._in_turn()

    def _refuse(self) -> None:
        """Before hours of work: what training would refuse in the end."""
        train = self._by_name.get("train")
        if train is None:
            return
        refuse_stale(self.project, train, train.look(self.project))
        if OuterPlace.here() is not None:
            raise ConfigError(
                "training in waves cannot be started by an outer launcher",
                where="store.max_bytes",
                why="its processes meet once, and each wave is a meeting of its own",
                hint="start eyas run alone; train.processes starts processes on this machine",
            )

    def _planned(self, rule: WaveRule) -> WavePlan:
        from eyas.store.listing import list_samples  # numpy is loaded only when it is needed

        list_samples(self.project.layout, self.ledger)
        plan = plan_waves(self.ledger.entries(), rule)
        captures = sum(len(wave.ids) for wave in plan.waves)
        self.progress.say(
            f"store.max_bytes is {format_bytes(rule.max_bytes)}: {counted(len(plan), 'wave')}, "
            f"{format_count(captures)} captures for training, {format_count(len(plan.kept))} samples stay; "
            f"at most {format_bytes(plan.most_bytes)} at once"
        )
        return plan

    def _settle(self) -> int:
        """Bring the store to where training stands; how many waves are over."""
        layout = self.project.layout
        for folder in reversed(checkpoint_folders(layout.checkpoints)):
            faults = seal_faults(folder)
            if not faults:
                break
            self.progress.say(f"checkpoint {folder.name} is damaged ({faults[0]}) and set aside")
            set_aside(folder, layout.set_aside, "; ".join(faults[:3]))
        position = self._position()
        done = settle(layout, self.ledger, self._rule, self._plan, position)
        if done.released:
            self.progress.say(
                f"wave {position} of {len(self._plan)} is over: {counted(done.released, 'sample')} released, "
                f"{format_bytes(done.num_bytes)} removed"
            )
        elif done.segments:
            self.progress.say(f"{format_bytes(done.num_bytes)} of waves that are not needed now removed")
        if done.recalled:
            self.progress.say(
                f"{counted(done.recalled, 'released sample')} are needed again and will be captured again"
            )
        return position

    def _position(self) -> int:
        """How many waves are over, by the newest checkpoint."""
        return waves_over(self.project.layout, self._plan.digest)

    def _train_is_over(self) -> bool:
        return self._by_name["train"].look(self.project).finished

    def _captures_left(self, position: int) -> bool:
        """Whether anything has to be captured, now or for a later epoch."""
        needed = {*self._plan.kept, *(name for wave in self._plan.waves[position:] for name in wave.ids)}
        ahead = len(self._plan.on_disk(position))
        later = self._plan.again and position + ahead < len(self._plan)
        return later or not_captured(self.ledger, needed) > 0

    def _capture(self) -> None:
        self.handover.more_to_capture = True
        self.run_one(self._by_name["extract"], self.stop, None)
        left = self._captures_left(self._position())
        if left:
            self.progress.say("the store is filled to its bound; eyas run trains, releases and goes on")
        else:
            self._all_captured()

    def _all_captured(self) -> None:
        self.handover.more_to_capture = False
        self.handover.ended("extract", {})

    def _train_what_is_there(self) -> None:
        train = self._by_name["train"]
        self.handover.more_to_capture = self._captures_left(self._position())
        while True:
            self.run_one(train, self.stop, None)
            position = self._settle()
            if self._train_is_over():
                return
            if not is_captured(self.ledger, self._plan, position):
                self.progress.say(f"wave {position + 1} of {len(self._plan)} is not captured yet: eyas run")
                return

    def _in_turn(self) -> None:
        extract, train = self._by_name["extract"], self._by_name["train"]
        capturing = True
        position = self._position()
        while True:
            if self._train_is_over() or not is_captured(self.ledger, self._plan, position):
                # as many waves as fit, so that the target is loaded no more often than it has to be
                self.handover.more_to_capture = True
                self.run_one(extract, self.stop, None)
            if capturing and not self._captures_left(position):
                capturing = False
                self._all_captured()
            self.handover.more_to_capture = capturing
            if self._train_is_over():
                self.run_one(train, self.stop, None)  # which says so
                return
            before = checkpoint_folders(self.project.layout.checkpoints)
            self.run_one(train, self.stop, None)
            position = self._settle()
            self._require_progress(before)

    def _require_progress(self, before: object) -> None:
        if not self._train_is_over() and checkpoint_folders(self.project.layout.checkpoints) == before:
            raise EyasError("training ended without a new checkpoint", where=self.project.layout.checkpoints)

    def _side_by_side(self) -> None:
        train = self._by_name["train"]
        while True:
            position = self._position()
            self.handover.more_to_capture = True
            capture = _Capture(self, Feed(self._plan, position))
            try:
                while not self._train_is_over():
                    capture.await_wave(position)
                    if capture.is_over and not self._captures_left(position):
                        self._all_captured()
                    before = checkpoint_folders(self.project.layout.checkpoints)
                    self.run_one(train, self.stop, None)
                    self._require_progress(before)
                    fell_back = self._settle() < position
                    position = self._position()
                    if fell_back:
                        break
                    capture.feed.moved(position)
                    self.stop.check()
            except BaseException:
                capture.abandon()
                raise
            capture.end()
            if self._train_is_over():
                if not self._captures_left(position):
                    self._all_captured()
                self.run_one(train, self.stop, None)  # which says so
                return


class _Capture:
    """The stage extract in a thread beside training."""

    def __init__(self, owner: WaveRun, feed: Feed) -> None:
        self.feed = feed
        self._owner = owner
        self._stop = StopFlag(owner.stop)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="eyas-capture", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        owner = self._owner
        try:
            owner.run_one(owner._by_name["extract"], self._stop, self.feed)
        except BaseException as error:
            self._error = error
            if isinstance(error, EyasError) and not isinstance(error, Stopped):
                owner.progress.say(f"capture ended: {error.what}; training goes on to the end of its wave")

    def await_wave(self, number: int) -> None:
        """Return when a wave can be trained and the capture has looked at what is there.

        Raises:
            Stopped: a stop was asked for.
            NotReady: the capture ended without it.
            Whatever ended the capture.
        """
        owner = self._owner
        while True:
            alive = self._thread.is_alive()
            owner.stop.check()
            if self._error is not None:
                raise self._error
            if (self.feed.asked or not alive) and self._is_there(number):
                return
            if not alive:
                raise NotReady(
                    f"wave {number + 1} was not captured", where=owner.project.layout.store, hint="eyas run"
                )
            time.sleep(_LOOK_SECONDS)

    def _is_there(self, number: int) -> bool:
        plan = self._owner._plan
        return number >= len(plan) or is_captured(self._owner.ledger, plan, number)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        """Let it end after what it is capturing now. Raises whatever ended it."""
        self.feed.end()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop it; what it has committed stays."""
        self._stop.request(SIGTERM)
        self.feed.end()
        self._thread.join()
