"""The README.md of an export: what it is, what it was made from, what it reaches, how to serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.base.units import format_bytes, format_count
from eyas.config.engine_layers import engine_layer_ids
from eyas.config.target_facts import TargetFacts
from eyas.export.engines import sglang_command, vllm_command
from eyas.export.layouts import engines_of


@dataclass(frozen=True)
class Acceptance:
    """Measured acceptance of one domain, or of all prompts together.

    Attributes:
        domain: ``all`` for the whole set.
        num_prompts: prompts decoded.
        acceptance_length: 1 + accepted drafts / target forwards, bonus token counted.
        conditional: share accepted at each position, of the drafts whose predecessors were accepted.
        unconditional: share accepted at each position, of all rounds.
    """

    domain: str
    num_prompts: int
    acceptance_length: float
    conditional: tuple[float, ...] = ()
    unconditional: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """How acceptance was measured, and what came out.

    ``num_drafts`` is K of the chain. The two rates are of the same code without and with the drafter,
    one prompt at a time, where both were timed. ``lossless`` says how drafted texts compare to plain ones.
    """

    num_drafts: int
    temperature: float
    max_new_tokens: int
    rows: Sequence[Acceptance]
    plain_tokens_per_second: float | None = None
    drafted_tokens_per_second: float | None = None
    device: str = ""
    lossless: str = ""

    @classmethod
    def from_report(cls, report: Mapping[str, Any], max_new_tokens: int, device: str = "") -> Measurement:
        """The measurement in an evaluation report (``reports/evaluation.json``).

        Raises:
            KeyError: the report lacks a field.
        """
        rows = [_acceptance("all", report)]
        rows += [_acceptance(domain, entry) for domain, entry in report["domains"].items()]
        speed, compared = report["speed"] or {}, report["lossless"]
        return cls(
            num_drafts=int(report["num_drafts"]),
            temperature=float(report["temperature"]),
            max_new_tokens=max_new_tokens,
            rows=rows if len(rows) > 2 else rows[:1],
            plain_tokens_per_second=speed.get("plain_tokens_per_second"),
            drafted_tokens_per_second=speed.get("drafted_tokens_per_second"),
            device=device,
            lossless=f"Beside plain greedy decoding: {compared['equal']:,} of {compared['num_prompts']:,} "
            "answers "
            f"are equal token for token, {compared['ties']:,} part at a numeric tie, "
            f"{compared['different']:,} differ.",
        )


def _acceptance(domain: str, entry: Mapping[str, Any]) -> Acceptance:
    return Acceptance(
        domain,
        int(entry["num_prompts"]),
        float(entry["acceptance_length"]),
        tuple(entry["conditional_rates"]),
        tuple(entry["unconditional_rates"]),
    )


@dataclass(frozen=True)
class CardContent:
    """Everything a model card tells.

    Attributes:
        name: of the export.
        target: its sizes; ``target_name`` and ``target_path`` as a reader knows it and would serve it.
        shape: the fields of a ``DrafterShape``.
        aux_layers: trained layers, "after k layers".
        data: counts by label, for example ``{"conversations": 300, "answer tokens": 41000}``.
        recipe: settings of training by label.
        measurement: None when nothing was measured; the card says so.
        files: name and bytes of each file.
        parameters: trained parameters.
        dtype: of the weights.
        layout: whose conventions the folder follows.
    """

    name: str
    target: TargetFacts
    target_name: str
    target_path: str
    shape: Mapping[str, object]
    aux_layers: Sequence[int]
    dtype: str
    parameters: int
    data: Mapping[str, object] = field(default_factory=dict)
    recipe: Mapping[str, object] = field(default_factory=dict)
    measurement: Measurement | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    eyas_version: str = ""
    layout: str = "both"


def model_card(content: CardContent, drafter_path: str = "PATH/TO/THIS/FOLDER") -> str:
    """The card as Markdown.

    Args:
        drafter_path: what the serving commands name as the drafter's folder.
    """
    num_drafts = content.measurement.num_drafts if content.measurement else 3
    sections = [
        _head(content),
        _numbers(content.measurement),
        _serving(content, drafter_path, num_drafts),
        _table("Data", content.data),
        _table("Recipe", content.recipe),
        _architecture(content),
        _licence(content),
        _files(content.files),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(content: CardContent) -> str:
    norms = "EAGLE-3.1" if content.shape.get("norms") == "eagle3.1" else "EAGLE-3"
    by = f" with eyas {content.eyas_version}" if content.eyas_version else " with eyas"
    return (
        f"# {content.name}\n\n"
        f"An {norms} draft model for **{content.target_name}**, trained{by}. The target drafts with it and "
        "verifies every token, so answers are the target's own; only their speed changes. It works with "
        "this target alone: it reads its hidden states and shares its embedding."
    )


def _numbers(measured: Measurement | None) -> str:
    if measured is None:
        return "## Acceptance\n\nNot measured. `eyas evaluate` measures it, `eyas export` renews this card."
    sampling = (
        "greedy (temperature 0)" if measured.temperature == 0 else f"temperature {measured.temperature:g}"
    )
    lines = [
        "## Acceptance",
        "",
        f"Chain of {measured.num_drafts} drafts, {sampling}, up to {measured.max_new_tokens:,} new tokens, "
        "held-out prompts. Acceptance length = 1 + accepted drafts / target forwards, bonus token counted.",
        "",
        "| Domain | Prompts | Acceptance length |",
        "|---|---:|---:|",
    ]
    lines += [f"| {_cell(r.domain)} | {r.num_prompts:,} | {r.acceptance_length:.2f} |" for r in measured.rows]
    for label, meaning, kind in (
        ("Conditional", "of drafts whose predecessors were all accepted", "conditional"),
        ("Unconditional", "of all rounds", "unconditional"),
    ):
        for row in measured.rows:
            rates = getattr(row, kind)
            if rates and row.domain == "all":
                shares = ", ".join(f"{100 * r:.1f}%" for r in rates)
                lines += ["", f"{label} acceptance by position ({meaning}): {shares}."]
    lines += ["", measured.lossless] if measured.lossless else []
    if measured.plain_tokens_per_second and measured.drafted_tokens_per_second:
        ratio = measured.drafted_tokens_per_second / measured.plain_tokens_per_second
        where = f" on {measured.device}" if measured.device else ""
        lines += [
            "",
            f"One prompt at a time{where}: {measured.drafted_tokens_per_second:.1f} tokens/s with the "
            f"drafter, {measured.plain_tokens_per_second:.1f} without ({ratio:.2f} times), by the same code.",
        ]
    return "\n".join(lines)


def _serving(content: CardContent, drafter_path: str, num_drafts: int) -> str:
    ids = engine_layer_ids(content.aux_layers, content.target)
    commands = {
        "vLLM": vllm_command(content.target_path, drafter_path, num_drafts),
        "SGLang": sglang_command(content.target_path, drafter_path, num_drafts),
    }
    engines = engines_of(content.layout)
    text = "## Serving" + "".join(f"\n\n{name}:\n\n```bash\n{commands[name]}\n```" for name in engines)
    if content.layout != "both":
        layers = ", ".join(map(str, content.aux_layers))
        caveats = "".join(f" {caveat}." for caveat in ids.caveats if "SGLang" in engines)
        return (
            f"{text}\n\nThe folder is in the layout `{content.layout}` and names the aux layers (after "
            f"layers {layers}) in that engine's own count; other engines may read it otherwise.{caveats}"
        )
    if ids.vllm is None:
        return text + "\n\nThe aux layers are both engines' default, so the configuration names none."
    text += (
        "\n\nThe configuration names the aux layers for each engine in its own count: "
        f"{list(ids.vllm)} at the top level for vLLM, "
        f"{list(ids.sglang or ())} within `eagle_config` for SGLang."
    )
    return text + "".join(f" {caveat}." for caveat in ids.caveats)


def _table(title: str, values: Mapping[str, object]) -> str:
    if not values:
        return ""
    rows = "\n".join(f"| {_cell(label)} | {_cell(_shown(value))} |" for label, value in values.items())
    return f"## {title}\n\n| | |\n|---|---|\n{rows}"


def _architecture(content: CardContent) -> str:
    shape, target = content.shape, content.target
    scaling = shape.get("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else "no scaling"
    return _table(
        "Architecture",
        {
            "parameters": f"{format_count(content.parameters)}, {content.dtype}",
            "hidden size": shape["hidden_size"],
            "MLP": shape["intermediate_size"],
            "attention": f"{shape['num_heads']} heads, {shape['num_kv_heads']} key-value heads, "
            f"{shape['head_dim']} wide",
            "aux states": f"after layers {', '.join(map(str, content.aux_layers))} of {target.num_layers}",
            "draft vocabulary": f"{shape['draft_vocab_size']:,} of {target.vocab_size:,}",
            "positions": target.max_position_embeddings,
            "rope": f"base {shape['rope_theta']:g}, {kind}",
        },
    )


def _licence(content: CardContent) -> str:
    return (
        "## Licence\n\n"
        f"The head and the final norm were started from {content.target_name}, and the training answers may "
        "be its own: the target's licence, and those of the prompts, apply to this drafter too. Check them "
        "before publishing it."
    )


def _files(files: Mapping[str, int]) -> str:
    return _table("Files", {f"`{name}`": format_bytes(size) for name, size in files.items()})


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(v) for v in value)
    return str(value)


def _cell(text: str) -> str:
    """Text that cannot end a table cell or a row."""
    return " ".join(text.replace("|", "\\|").split())
