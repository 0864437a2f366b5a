"""Charts as plain data in plotly's JSON form; colours and fonts are the page's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.report.evaluation import Predicted, PredictionView
from eyas.report.history import AttemptView
from eyas.report.overview import Overview


@dataclass(frozen=True)
class Chart:
    """One picture: what it shows in words, its traces and the parts of the layout that are its own."""

    id: str
    section: str
    title: str
    traces: tuple[dict[str, Any], ...]
    layout: dict[str, Any]


def charts(view: Overview) -> list[Chart]:
    """All charts that have something to show, in the order of the page."""
    found = [*_data(view), *_extraction(view), *_store(view), *_training(view), *_evaluation(view)]
    return [chart for chart in [*found, _timeline(view)] if chart is not None and chart.traces]


def _data(view: Overview) -> list[Chart | None]:
    data = view.data
    if data is None:
        return []
    what = "samples" if data.samples else "first prompts"
    lengths = {
        "type": "bar",
        "x": [(b.start + b.end - 1) / 2 for b in data.lengths],
        "y": [b.count for b in data.lengths],
        "width": [b.end - b.start for b in data.lengths],
        "hovertext": [f"{b.start} to {b.end - 1} tokens: {b.count:,}" for b in data.lengths],
        "hoverinfo": "text",
        "name": what,
    }
    found: list[Chart | None] = [
        Chart(
            "lengths", "data", f"Length of {what}", (lengths,) if data.lengths else (),
            axes("tokens", what) | {"bargap": 0.06},
        )
    ]  # fmt: skip
    if len(data.domains) > 1:
        found.append(_bars("domains", "data", "Records by domain", [d.name for d in data.domains],
                           [d.records for d in data.domains], "records"))  # fmt: skip
    if data.drops:
        found.append(_bars("drops", "data", "Left out, by reason", list(data.drops),
                           list(data.drops.values()), "records or samples"))  # fmt: skip
    return found


def _extraction(view: Overview) -> list[Chart | None]:
    found: list[Chart | None] = []
    for stage, unit in (("regenerate", "answers"), ("extract", "tokens")):
        traces = _rate_traces(view.attempts, stage)
        title = f"{unit.capitalize()} per second, by attempt"
        found.append(
            Chart(f"rate-{stage}", "extraction", title, traces, axes("time (UTC)", f"{unit}/s", zero=True))
        )
    if view.failure_reasons:
        found.append(_bars("failures", "extraction", "Failed captures, by reason", list(view.failure_reasons),
                           list(view.failure_reasons.values()), "tries"))  # fmt: skip
    return found


def _rate_traces(attempts: Sequence[AttemptView], stage: str) -> tuple[dict[str, Any], ...]:
    """One line an attempt, so that the gaps between them stay gaps."""
    return tuple(
        line(
            attempt.name,
            [point.at for point in attempt.rates[stage]],
            [point.rate for point in attempt.rates[stage]],
        )
        | {"mode": "lines+markers", "marker": {"size": 4}, "line": {"shape": "vh"}}
        for attempt in attempts
        if attempt.rates.get(stage)
    )


def _store(view: Overview) -> list[Chart | None]:
    store = view.store
    if store is None:
        return []
    growth = line(
        "captured" if store.released else "stored",
        [p.at for p in store.growth],
        [p.bytes for p in store.growth],
    )
    title = "Bytes captured, released ones counted" if store.released else "Bytes in the store"
    weight = {
        "type": "bar",
        "orientation": "h",
        "x": [store.bytes_per_token, store.forecast_bytes_per_token],
        "y": ["actual", "forecast"],
        "text": [f"{store.bytes_per_token:,.0f}", f"{store.forecast_bytes_per_token:,.0f}"],
        "textposition": "auto",
        "name": "bytes per token",
    }
    return [
        Chart("store-growth", "store", title, (growth,), axes("time (UTC)", "bytes", zero=True)),
        Chart("store-weight", "store", "Bytes per token", (weight,), axes("bytes", None, zero_x=True)),
    ]


def _training(view: Overview) -> list[Chart | None]:
    training = view.training
    if training is None:
        return []
    steps = [point.step for point in training.points]
    checks = training.validations
    num_steps = max((len(point.step_loss) for point in training.points), default=0)
    losses = tuple(
        line(
            f"draft step {j}",
            steps,
            [p.step_loss[j] if len(p.step_loss) > j else None for p in training.points],
        )
        for j in range(num_steps)
    )
    held_out = line("validation, step 0", [c.step for c in checks], [c.loss[0] for c in checks if c.loss])
    rates = tuple(
        line(f"draft step {j}", [c.step for c in checks], [c.acceptance[j] for c in checks]) | _MARKED
        for j in range(min((len(c.acceptance) for c in checks), default=0))
    )
    lengths = line("acceptance length", [c.step for c in checks], [c.acceptance_length for c in checks])

    def curve(id_: str, title: str, name: str, values: list[float], axis: str) -> Chart:
        return Chart(id_, "training", title, (line(name, steps, values),), axes("step", axis, zero=True))

    points = training.points
    return [
        Chart(
            "loss",
            "training",
            "Loss by draft step",
            (*losses, *([held_out | _MARKED] if checks else [])),
            axes("step", "cross-entropy"),
        ),
        Chart(
            "step-acceptance",
            "training",
            "Acceptance on held-out samples, by draft step",
            rates,
            axes("step", "rate", zero=True),
        ),
        Chart(
            "walk",
            "training",
            "Acceptance length on held-out samples",
            (lengths | _MARKED,) if checks else (),
            axes("step", "tokens per target forward"),
        ),
        curve("learning-rate", "Learning rate", "learning rate", [p.learning_rate for p in points], ""),
        curve("gradient-norm", "Gradient norm, unclipped", "norm", [p.gradient_norm for p in points], ""),
        curve("speed", "Training speed", "tokens/s", [p.tokens_per_second for p in points], "tokens/s"),
        curve("data-wait", "Waiting for data", "share", [p.data_wait_share for p in points], "share of time"),
    ]


def _evaluation(view: Overview) -> list[Chart | None]:
    found = view.evaluation
    if found is None:
        return []
    rows = [found.total, *found.domains]
    by_domain = {
        "type": "bar",
        "x": [row.name for row in rows],
        "y": [row.acceptance_length for row in rows],
        "text": [f"{row.acceptance_length:.2f}" for row in rows],
        "textposition": "auto",
        "name": "acceptance length",
    }
    places = [str(k + 1) for k in range(found.num_drafts)]
    positions = tuple(
        {"type": "bar", "x": places, "y": list(values), "name": name,
         "text": [f"{value:.0%}" for value in values], "textposition": "auto"}
        for name, values in (
            ("conditional", found.total.conditional),
            ("unconditional", found.total.unconditional),
        )
    )  # fmt: skip
    speeds: tuple[dict[str, Any], ...] = ()
    if found.plain_tokens_per_second and found.drafted_tokens_per_second:
        values = [found.plain_tokens_per_second, found.drafted_tokens_per_second]
        speeds = (
            {"type": "bar", "x": ["plain decoding", "with the drafter"], "y": values,
             "text": [f"{value:.1f}" for value in values], "textposition": "auto", "name": "tokens/s"},
        )  # fmt: skip
    return [
        Chart("by-domain", "evaluation", "Acceptance length by domain", (by_domain,),
              axes("", "tokens per target forward", zero=True) | {"xaxis": {"type": "category"}}),
        Chart("by-position", "evaluation", "Accepted drafts by position", positions,
              axes("position in the chain", "rate", zero=True) | {"barmode": "group"}),
        *_predicted(found.prediction, found.num_drafts),
        Chart("against-plain", "evaluation", "Speed, one prompt at a time", speeds,
              axes("", "tokens/s", zero=True)),
    ]  # fmt: skip


def _predicted(found: PredictionView | None, num_drafts: int) -> list[Chart | None]:
    """Acceptance length along stored answers by what it depends on; the bars' ends are 95% intervals."""
    if found is None:
        return []
    chain = f"chain of {num_drafts}"
    parts = (
        ("by-drafts", "by number of drafts", "drafts a round", found.drafts),
        ("by-place", f"by place in the answer, {chain}", "tokens into the answer", found.places),
        ("by-prompt", f"by length of the prompt, {chain}", "tokens of the prompt", found.prompt_lengths),
    )
    return [
        Chart(id_, "evaluation", f"Acceptance length {title}", (_with_interval(rows),) if rows else (),
              axes(unit, "tokens per target forward", zero=True)
              | {"xaxis": {"type": "category", "title": {"text": unit}}})
        for id_, title, unit, rows in parts
    ]  # fmt: skip


def _with_interval(rows: Sequence[Predicted]) -> dict[str, Any]:
    lengths = [row.acceptance_length for row in rows]
    return {
        "type": "bar", "x": [row.part for row in rows], "y": lengths, "name": "acceptance length",
        "text": [f"{length:.2f}" for length in lengths],
        "textposition": "inside", "insidetextanchor": "start",
        "error_y": {
            "type": "data", "symmetric": False, "color": "#8a93a3",  # to be seen on both papers
            "array": [row.high - row.acceptance_length for row in rows],
            "arrayminus": [row.acceptance_length - row.low for row in rows],
        },
    }  # fmt: skip


def _timeline(view: Overview) -> Chart | None:
    """Stages of each attempt as bars over time, incidents as crosses."""
    names = sorted({run.stage for attempt in view.attempts for run in attempt.stages})
    if not names:
        return None
    traces: list[dict[str, Any]] = []
    for stage in ("prepare", "regenerate", "extract", "train", "evaluate", "export"):
        runs = [(a, run) for a in view.attempts for run in a.stages if run.stage == stage]
        if not runs:
            continue
        xs: list[str | None] = []
        ys: list[str | None] = []
        for attempt, run in runs:
            xs += [run.started, run.ended or attempt.last_event, None]
            ys += [attempt.name, attempt.name, None]
        traces.append(line(stage, xs, ys) | {"line": {"width": 12}, "hoverinfo": "name+x"})
    broken = [a for a in view.attempts if a.outcome not in ("done", "Stopped")]
    running = view.status.last_attempt.name if view.status.running and view.status.last_attempt else ""
    broken = [a for a in broken if a.name != running]
    if broken:
        traces.append(
            {"type": "scatter", "mode": "markers", "name": "ended by", "x": [a.last_event for a in broken],
             "y": [a.name for a in broken], "hovertext": [a.outcome for a in broken], "hoverinfo": "text",
             "marker": {"symbol": "x", "size": 10}}
        )  # fmt: skip
    layout = axes("time (UTC)", None) | {"height": 170 + 26 * min(len(view.attempts), 40)}
    return Chart("timeline", "timeline", "Attempts and their stages", tuple(traces), layout)


_MARKED = {"mode": "lines+markers"}


def line(name: str, x: Sequence[object], y: Sequence[object]) -> dict[str, Any]:
    """A trace of points joined by a line."""
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y)}


def _bars(id_: str, section: str, title: str, names: list[str], counts: list[int], unit: str) -> Chart:
    """Horizontal bars, the longest on top; long names are cut."""
    order = sorted(range(len(names)), key=lambda i: counts[i])[-20:]
    short = [names[i] if len(names[i]) <= 38 else names[i][:35] + "..." for i in order]
    trace = {
        "type": "bar", "orientation": "h", "x": [counts[i] for i in order], "y": short,
        "text": [f"{counts[i]:,}" for i in order], "textposition": "auto",
        "hovertext": [names[i] for i in order], "hoverinfo": "text+x", "name": unit,
    }  # fmt: skip
    layout = axes(unit, None, zero_x=True) | {"height": 130 + 28 * len(order)}
    return Chart(id_, section, title, (trace,) if order else (), layout)


def axes(x: str, y: str | None, *, zero: bool = False, zero_x: bool = False) -> dict[str, Any]:
    """A layout with titles of the axes; ``zero``: the upward one begins at 0."""
    xaxis: dict[str, Any] = {"title": {"text": x}}
    yaxis: dict[str, Any] = {"automargin": True} if y is None else {"title": {"text": y}}
    if zero:
        yaxis["rangemode"] = "tozero"
    if zero_x:
        xaxis["rangemode"] = "tozero"
    return {"xaxis": xaxis, "yaxis": yaxis}
