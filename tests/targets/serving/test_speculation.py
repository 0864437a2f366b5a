"""Acceptance length out of vLLM's /metrics."""

from __future__ import annotations

import pytest

from eyas.targets.serving.speculation import Speculation, parse_metrics, parse_speculation

TEXT = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/models/a, \\"b\\" {c}"} 200.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76446e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 40.0
vllm:request_success_total{finished_reason="stop"} NaN
a line that is no metric
"""


def test_counts_and_acceptance_length() -> None:
    found = parse_speculation(TEXT)
    assert found == Speculation(200, 150, (100, 40, 10))
    assert found.acceptance_length == 1.75  # 200 rounds gave 200 + 150 tokens
    assert found.unconditional_rates == (0.5, 0.2, 0.05)
    labels, value = parse_metrics(TEXT)["vllm:spec_decode_num_drafts_total"][0]
    assert (labels["engine"], value) == ("0", 200.0)


def test_engines_are_summed() -> None:
    second = TEXT.replace('engine="0"', 'engine="1"')
    found = parse_speculation(TEXT + second)
    assert found == Speculation(400, 300, (200, 80, 20))


def test_between_two_readings() -> None:
    earlier = Speculation(0, 0, ())
    later = Speculation(200, 150, (100, 40, 10))
    assert later.since(earlier) == later
    assert Speculation(250, 180, (120, 45, 15)).since(later) == Speculation(50, 30, (20, 5, 5))


def test_a_server_without_a_drafter() -> None:
    assert parse_speculation("vllm:request_success_total 3\n") is None
    assert parse_speculation("") is None
    with pytest.raises(ZeroDivisionError):
        _ = Speculation(0, 0, ()).acceptance_length
