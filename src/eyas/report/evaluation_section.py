"""What evaluation measured, as tables."""

from __future__ import annotations

from eyas.report.evaluation import EvaluationView
from eyas.report.overview import Overview
from eyas.report.tables import Section, Table, filled, number_cell, pairs, rates_text, table
from eyas.report.words import at_minute


def evaluation_section(view: Overview) -> Section:
    found = view.evaluation
    if found is None:
        return Section("evaluation", "Evaluation", empty="Nothing is measured yet.")
    speed = "not timed"
    if found.speedup and found.plain_tokens_per_second and found.drafted_tokens_per_second:
        speed = (
            f"{found.drafted_tokens_per_second:.1f} tokens/s with the drafter, "
            f"{found.plain_tokens_per_second:.1f} without: {found.speedup:.2f} times"
        )
    equal = f"{found.equal_texts} of {found.num_answers} equal plain decoding"
    if found.tied_texts or found.different_texts:
        equal += f", {found.tied_texts} part at a numeric tie, {found.different_texts} are different"
    facts = pairs([
        ("acceptance length", f"{found.total.acceptance_length:.3f} tokens per target forward "
                              f"(bonus token counted), "
                              f"{found.num_drafts} drafts a round, greedy"),
        *_tree(found),
        ("texts", equal),
        ("speed, one prompt at a time", speed),
        ("measured", f"{at_minute(found.at)}, {found.dtype}, {found.num_answers:,} answers, "
                     f"{found.num_tokens:,} tokens"),
    ])  # fmt: skip
    rows = [
        (row.name, row.num_prompts, number_cell(f"{row.acceptance_length:.3f}"),
         rates_text(row.conditional), rates_text(row.unconditional))
        for row in (found.total, *found.domains)
    ]  # fmt: skip
    columns = (
        "domain",
        "prompts",
        "acceptance length",
        "conditional by position",
        "unconditional by position",
    )
    tables = [facts, table("By domain", columns, rows), _predicted(found)]
    return Section("evaluation", "Evaluation", tables=filled(tables))


def _predicted(found: EvaluationView) -> Table:
    title = "Along stored answers of held-out conversations, with 95% intervals"
    if found.prediction is None:
        return Table(title, (), ())
    chain = str(found.num_drafts)
    groups = (
        ("{}", "all tokens", found.prediction.drafts),
        (chain, "tokens {} of the answer", found.prediction.places),
        (chain, "prompts of {} tokens", found.prediction.prompt_lengths),
    )
    rows = [
        (drafts.format(row.part), over.format(row.part),
         f"{row.acceptance_length:.3f} ({row.low:.3f} to {row.high:.3f})")
        for drafts, over, predicted in groups for row in predicted
    ]  # fmt: skip
    return table(title, ("chain of", "over", "acceptance length"), rows)


def _tree(found: EvaluationView) -> list[tuple[str, str]]:
    tree = found.tree
    if tree is None:
        return []
    shape = f"{tree.total_tokens} drafts a round, depth {tree.depth}, top {tree.top_k}"
    return [
        ("acceptance length with trees", f"{tree.acceptance_length:.3f} tokens per target forward, {shape}")
    ]
