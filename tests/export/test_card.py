"""A model card that tells every number with what it means."""

from __future__ import annotations

import dataclasses

from eyas.export.card import Acceptance, CardContent, Measurement, model_card
from tests.export import make

CONTENT = CardContent(
    name="demo-eagle3",
    target=make.facts(),
    target_name="SmolLM2-135M-Instruct",
    target_path="/models/smol lm",
    shape=make.shape(),
    aux_layers=(2, 6, 9),
    dtype="bfloat16",
    parameters=12_345_678,
    data={"conversations": 300, "answer tokens": 41_234, "sources": ["prompts.jsonl", "a|b"]},
    recipe={"learning rate": 1e-3, "draft steps": 7, "warm start": "head+ridge", "resumed": False},
    measurement=Measurement(
        num_drafts=3,
        temperature=0.0,
        max_new_tokens=256,
        rows=[
            Acceptance("all", 60, 1.7391, (0.512, 0.401, 0.333), (0.512, 0.205, 0.068)),
            Acceptance("code", 10, 1.9, (0.9,), (0.9,)),
        ],
        plain_tokens_per_second=20.0,
        drafted_tokens_per_second=25.0,
        device="2 CPU cores",
    ),
    files={"model.safetensors": 24_700_000, "config.json": 1_200},
    eyas_version="0.1.0",
)


def test_every_number_is_in_the_card() -> None:
    card = model_card(CONTENT, "/exports/demo")
    for text in (
        "# demo-eagle3\n",
        "**SmolLM2-135M-Instruct**",
        "Chain of 3 drafts, greedy (temperature 0), up to 256 new tokens",
        "| all | 60 | 1.74 |",
        "| code | 10 | 1.90 |",
        "Conditional acceptance by position (of drafts whose predecessors were all accepted): "
        "51.2%, 40.1%, 33.3%.",
        "Unconditional acceptance by position (of all rounds): 51.2%, 20.5%, 6.8%.",
        "25.0 tokens/s with the drafter, 20.0 without (1.25 times)",
        "| answer tokens | 41,234 |",
        "| sources | prompts.jsonl, a\\|b |",
        "| learning rate | 0.001 |",
        "| resumed | no |",
        "| parameters | 12.3M, bfloat16 |",
        "| aux states | after layers 2, 6, 9 of 12 |",
        "| draft vocabulary | 40 of 96 |",
        "| `model.safetensors` | 24.7 MB |",
        "## Licence",
    ):
        assert text in card
    assert card.endswith("|\n")
    assert "90.0%" not in card  # rates stand for the whole set only


def test_serving_commands_are_exact() -> None:
    card = model_card(CONTENT, "/exports/demo")
    assert (
        "python -m vllm.entrypoints.openai.api_server \\\n  --model '/models/smol lm' \\\n"
        "  --speculative-config "
        """'{"method":"eagle3","model":"/exports/demo","num_speculative_tokens":3}'"""
    ) in card
    assert (
        "python -m sglang.launch_server \\\n  --model-path '/models/smol lm' \\\n"
        "  --speculative-algorithm EAGLE3 --speculative-draft-model-path /exports/demo \\\n"
        "  --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    ) in card


def test_layers_are_told_in_each_engines_count() -> None:
    assert "both engines' default" in model_card(CONTENT)
    card = model_card(dataclasses.replace(CONTENT, aux_layers=(1, 5, 10)))
    assert "[1, 5, 10] at the top level for vLLM, [0, 4, 9] within `eagle_config` for SGLang" in card
    card = model_card(dataclasses.replace(CONTENT, aux_layers=(0, 5, 10)))
    assert "SGLang cannot capture the embeddings" in card


def test_nothing_measured_is_said() -> None:
    card = model_card(dataclasses.replace(CONTENT, measurement=None, data={}))
    assert "Not measured" in card
    assert "## Data" not in card


def test_sampling_and_new_norms_are_said() -> None:
    measured = dataclasses.replace(CONTENT.measurement, temperature=0.7)  # type: ignore[type-var]
    card = model_card(dataclasses.replace(CONTENT, measurement=measured, shape=make.shape(norms="eagle3.1")))
    assert "temperature 0.7" in card
    assert "An EAGLE-3.1 draft model" in card


def test_the_evaluation_report_becomes_the_measurement() -> None:
    entry = {
        "num_prompts": 12,
        "acceptance_length": 1.5,
        "conditional_rates": [0.3, 0.5, 0.25],
        "unconditional_rates": [0.3, 0.15, 0.05],
    }
    report = {
        **entry,
        "num_prompts": 24,
        "num_drafts": 3,
        "temperature": 0.0,
        "domains": {"code": entry, "chat": {**entry, "acceptance_length": 1.25}},
        "lossless": {"num_prompts": 30, "equal": 28, "ties": 2, "different": 0},
        "speed": {"plain_tokens_per_second": 10.0, "drafted_tokens_per_second": 12.0},
    }
    measured = Measurement.from_report(report, 96, "one GPU")
    card = model_card(dataclasses.replace(CONTENT, measurement=measured))
    for text in (
        "| all | 24 | 1.50 |",
        "| code | 12 | 1.50 |",
        "| chat | 12 | 1.25 |",
        "28 of 30 answers are equal token for token, 2 part at a numeric tie, 0 differ",
        "One prompt at a time on one GPU: 12.0 tokens/s",
        "30.0%, 50.0%, 25.0%",
    ):
        assert text in card
    untimed = Measurement.from_report({**report, "domains": {"chat": entry}, "speed": None}, 96)
    assert untimed.plain_tokens_per_second is None
    assert [row.domain for row in untimed.rows] == ["all"]
