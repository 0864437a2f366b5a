"""The report as sections of tables, before it becomes HTML or Markdown."""

from __future__ import annotations

from pathlib import Path

from eyas.base.units import format_bytes, format_count, format_seconds
from eyas.report.evaluation_section import evaluation_section
from eyas.report.history import AttemptView
from eyas.report.now import LastAttempt, Running
from eyas.report.overview import Overview
from eyas.report.server_status import server_text
from eyas.report.tables import (
    Cell,
    Section,
    Table,
    by_count,
    count_cell,
    filled,
    number_cell,
    pairs,
    rates_text,
    table,
)
from eyas.report.words import at_minute, count_text, done_text, ended_text, rate_text, time_left_text

_MAX_ATTEMPTS = 60


def headline(view: Overview) -> str:
    """One sentence: what goes on, or how it ended."""
    status = view.status
    if status.running is not None:
        return running_text(status.running)
    if all(stage.state in ("done", "skipped") for stage in status.stages) and not status.problems:
        return "Everything is done."
    return last_text(status.last_attempt)


def running_text(running: Running) -> str:
    """``eyas run is at work: extract, capture, 31% done, 12 min to 15 min left.``"""
    if not running.stage:
        return f"eyas {running.verb} is starting."
    parts = [f"{running.stage}, {running.label}"]
    if running.total:
        parts.append(f"{100 * running.done / running.total:.0f}% done")
    left = time_left_text(running)
    return f"eyas {running.verb} is at work: {', '.join([*parts, *([left] if left else [])])}."


def last_text(last: LastAttempt | None) -> str:
    """How the newest attempt ended, in a sentence."""
    if last is None:
        return "Nothing was run yet."
    return f"{last.name} {ended_text(last.outcome, last.what)}."


def sections(view: Overview) -> list[Section]:
    """All sections, in the order of the pipeline."""
    return [
        _now(view),
        _data(view),
        _extraction(view),
        _store(view),
        _training(view),
        evaluation_section(view),
        _timeline(view),
        _provenance(view),
    ]


def _now(view: Overview) -> Section:
    status = view.status
    rows = []
    for stage in status.stages:
        key = f"stages.{stage.name}"
        is_running = status.running is not None and status.running.stage == stage.name
        rows.append((
            Cell(stage.name),
            Cell("running" if is_running else stage.state, f"{key}.state", stage.state),
            Cell(count_text(stage), f"{key}.done", stage.done),
            count_cell(stage.samples, f"{key}.samples"),
            count_cell(stage.tokens, f"{key}.tokens"),
            Cell(format_bytes(stage.bytes) if stage.bytes else "", f"{key}.bytes", stage.bytes, number=True),
        ))  # fmt: skip
    stages = Table("", ("stage", "state", "done", "samples", "tokens", "on disk"), tuple(rows))
    stale = [f"{s.name} was made by another recipe: {d}" for s in status.stages for d in s.differences]
    return Section("now", "Now", headline(view), (stages, _facts(view)), warnings=(*status.problems, *stale))


def _facts(view: Overview) -> Table:
    status, disk, now = view.status, view.status.disk, view.status.running
    rows: list[tuple[Cell, Cell]] = []

    def add(name: str, text: str, key: str = "", value: float | int | str | None = None) -> None:
        rows.append((Cell(name), Cell(text, key, value)))

    if now is not None and now.stage:
        add("at work", f"{now.stage}: {done_text(now)}", "running.done", now.done)
        add("rate of this attempt", rate_text(now), "running.rate", now.rate)
        if now.silent_seconds is not None:
            add("last event", f"{format_seconds(now.silent_seconds)} ago")
    elif status.last_attempt is not None and status.last_attempt.last_event:
        add("last event", f"{at_minute(status.last_attempt.last_event)} UTC")
    if status.training is not None:
        trained = status.training
        if trained.checkpoint is not None:
            age = (
                ""
                if trained.checkpoint_seconds is None
                else f", {format_seconds(trained.checkpoint_seconds)} old"
            )
            add("last checkpoint", f"{trained.checkpoint}{age}")
        if trained.validation_acceptance_length is not None:
            add(
                "last validation",
                f"acceptance length {trained.validation_acceptance_length:.3f} "
                f"at step {trained.validation_step}",
                "training.validation_acceptance_length",
                trained.validation_acceptance_length,
            )
    for server in status.servers:
        add("server", server_text(server))
    add("project on disk", format_bytes(disk.used_bytes), "disk.used_bytes", disk.used_bytes)
    add("free", format_bytes(disk.free_bytes))
    if disk.left_bytes is not None:
        fits = "it fits" if disk.fits else "it does not fit"
        add(
            "still to be written",
            f"{format_bytes(disk.left_bytes)}: {fits}",
            "disk.left_bytes",
            disk.left_bytes,
        )
    if status.set_aside_samples:
        add(
            "samples set aside",
            format_count(status.set_aside_samples),
            "set_aside_samples",
            status.set_aside_samples,
        )
    if status.set_aside_files:
        add(
            "files set aside", format_count(status.set_aside_files), "set_aside_files", status.set_aside_files
        )
    for todo in status.open_todos[:5]:
        add("todo", todo)
    if status.then:
        add("then" if now else "left", ", ".join(status.then))
    add("next", status.next_command or "nothing to do")
    return Table("", (), tuple(rows))


def _data(view: Overview) -> Section:
    data = view.data
    if data is None:
        return Section("data", "Data", empty="Nothing is prepared yet.")
    answered = [("samples", "none yet: answers come first")]
    if data.samples:
        share = f"{data.supervised_tokens / data.tokens:.1%}" if data.tokens else "-"
        answered = [
            ("samples", f"{data.samples:,}"),
            ("tokens", f"{data.tokens:,}"),
            ("supervised", f"{data.supervised_tokens:,} ({share})"),
        ]
    facts = pairs([
        ("records read", f"{data.records:,}"),
        ("conversations kept", f"{data.kept:,} ({data.train_conversations:,} to train on, "
                               f"{data.validation_conversations:,} held out)"),
        *answered,
        ("cut to max_seq_len", f"{data.truncated:,}"),
    ])  # fmt: skip
    tables = [facts]
    for title, groups in (("By domain", data.domains), ("By source", data.sources)):
        rows = [(d.name, d.records, d.kept, d.dropped, d.samples or d.prompts) for d in groups[:40]]
        tables.append(table(title, ("name", "records", "kept", "dropped", "samples or prompts"), rows))
    tables.append(table("Left out, by reason", ("reason", "count"), by_count(data.drops)))
    tables.append(table("Answers", ("how they ended", "count"), sorted(data.answers.items())))
    tables.append(table("Worth a look", ("note", "count"), sorted(data.notes.items())))
    return Section("data", "Data", tables=filled(tables))


def _extraction(view: Overview) -> Section:
    rows = []
    for attempt in view.attempts:
        for run in attempt.stages:
            if run.stage in ("regenerate", "extract"):
                numbers = run.numbers
                did = numbers.get("captured", numbers.get("answered", ""))
                tokens = numbers.get("tokens" if run.stage == "extract" else "answer_tokens", "")
                rate = tokens / run.seconds if isinstance(tokens, int) and run.seconds > 0 else None
                rows.append((
                    attempt.name, run.stage, at_minute(run.started), format_seconds(run.seconds),
                    did if run.ended else "not finished", tokens,
                    number_cell("" if rate is None else f"{rate:,.0f}"),
                ))  # fmt: skip
    columns = ("attempt", "stage", "started", "took", "samples or answers", "tokens", "tokens/s")
    failures = by_count(view.failure_reasons)
    named = [(f.id, f.state, f.failures, f.reason) for f in view.status.failures]
    tables = [
        table("Attempts", columns, rows[-_MAX_ATTEMPTS:]),
        table("Failed tries, by reason", ("reason", "tries"), failures),
        table("Samples that failed", ("sample", "state", "tries", "last reason"), named),
    ]
    return Section(
        "extraction", "Answers and extraction", tables=filled(tables), empty="Nothing was captured yet."
    )


def _waves(view: Overview) -> list[tuple[str, str]]:
    """Of a store with a bound: the bound, and where its waves are."""
    waves = view.status.waves
    if waves is None:
        return []
    over = "not planned yet" if waves.waves is None else f"{waves.waves_over:,} of {waves.waves:,} are over"
    return [
        ("bound", f"{format_bytes(waves.max_bytes)}; the store takes {format_bytes(waves.store_bytes)}"),
        ("waves", f"{over}; {waves.stored:,} samples on disk, {waves.released:,} released"),
    ]


def _store(view: Overview) -> Section:
    store = view.store
    if store is None:
        return Section("store", "Store", empty="The store holds nothing yet.")
    ratio = store.bytes / store.forecast_bytes if store.forecast_bytes else 0.0
    facts = pairs([
        ("segments", f"{store.segments:,}, {store.verified:,} of them hashed after their commit"),
        *([("released", f"{store.released:,} segments, trained on")] if store.released else []),
        *_waves(view),
        ("samples", f"{store.samples:,}"),
        ("tokens", f"{store.tokens:,}"),
        ("bytes", f"{format_bytes(store.bytes)}; the recipe says {format_bytes(store.forecast_bytes)}"),
        ("bytes per token", f"{store.bytes_per_token:,.1f}; "
                            f"the recipe says {store.forecast_bytes_per_token:,.1f}"),
        ("actual to forecast", f"{ratio:.4f}"),
    ])  # fmt: skip
    return Section("store", "Store", tables=(facts,))


def _training(view: Overview) -> Section:
    training = view.training
    if training is None:
        return Section("training", "Training", empty="Training has not begun.")
    facts = pairs([
        ("steps", f"{training.num_steps:,}"),
        ("checkpoints written", f"{training.num_checkpoints:,}, "
                                f"{format_seconds(training.checkpoint_seconds)} in all"),
        ("steps skipped", f"{training.num_skipped:,}"),
        ("time spent waiting for data", f"{training.data_wait_share:.1%}"),
    ])  # fmt: skip
    rows = [
        (check.step, number_cell(f"{check.loss[0]:.3f}"), number_cell(f"{check.top1[0]:.1%}"),
         number_cell(f"{check.acceptance_length:.3f}"), rates_text(check.acceptance))
        for check in training.validations if check.loss and check.top1
    ]  # fmt: skip
    columns = ("step", "loss of step 0", "top-1", "acceptance length", "acceptance by draft step")
    return Section("training", "Training", tables=filled([facts, table("Held-out samples", columns, rows)]))


def _timeline(view: Overview) -> Section:
    rows = [
        (a.name, a.verb, at_minute(a.started), format_seconds(a.seconds), a.outcome, _did(a), a.what or "")
        for a in view.attempts[-_MAX_ATTEMPTS:]
    ]
    columns = ("attempt", "verb", "started (UTC)", "lasted", "outcome", "stages", "why")
    wrong = [(at_minute(i.at), i.kind, i.text, i.mended or "open") for i in view.incidents]
    moved = [(at_minute(m.at), m.name, m.reason) for m in view.status.set_aside]
    tables = [
        table("Attempts", columns, rows),
        table("Incidents", ("when (UTC)", "what", "text", "mended"), wrong),
        table("Set aside", ("when (UTC)", "name", "reason"), moved),
    ]
    return Section("timeline", "Timeline", tables=filled(tables), empty="Nothing was run yet.")


def _did(attempt: AttemptView) -> str:
    return ", ".join(run.stage if run.ended else f"{run.stage} (not finished)" for run in attempt.stages)


def _provenance(view: Overview) -> Section:
    rows = [(fact.group, fact.name, fact.value) for fact in view.provenance]
    return Section("provenance", "Provenance", tables=(table("", ("of", "what", "value"), rows),))


def project_name(view: Overview) -> str:
    """Name of the folder, which is how people call a project."""
    return Path(view.status.project).name
