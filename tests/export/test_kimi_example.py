"""The example of a trillion-parameter target: its sizes are read, its plan is valid, its export is right."""

from __future__ import annotations

from pathlib import Path

from eyas.config.engine_layers import engine_layer_ids
from eyas.config.load import load_config
from eyas.config.target_facts import read_target_facts
from eyas.export.layout import eagle3_config
from tests.cli.command import eyas
from tests.export import make

EXAMPLE = Path(__file__).parents[2] / "examples" / "kimi-k2.5"


def test_sizes_come_from_the_nested_configuration() -> None:
    facts = read_target_facts(EXAMPLE / "target")
    assert (facts.num_layers, facts.hidden_size, facts.num_heads) == (61, 7168, 64)
    assert (facts.vocab_size, facts.intermediate_size) == (163840, 18432)
    assert facts.rope_theta == 50000.0
    assert facts.rope_scaling is not None
    assert facts.rope_scaling["factor"] == 64.0
    assert facts.rope_scaling["original_max_position_embeddings"] == 4096
    assert facts.max_position_embeddings == 64 * 4096


def test_the_plan_is_valid_and_its_layers_are_the_default() -> None:
    config = load_config(EXAMPLE)
    facts = read_target_facts(EXAMPLE / config.target.model)
    assert config.extract.aux_layers == facts.default_aux_layers() == (2, 30, 58)
    assert (len(config.extract.aux_layers) + 1) * facts.hidden_size * 2 == 57344
    assert engine_layer_ids((2, 30, 58), facts).vllm is None


def test_other_layers_are_counted_as_this_kind_of_target_is() -> None:
    facts = read_target_facts(EXAMPLE / "target")
    ids = engine_layer_ids((4, 30, 57), facts)
    assert ids.vllm == ids.sglang == (4, 30, 57)
    assert engine_layer_ids((1, 30, 57), facts).sglang == (30, 57, 1)


def test_the_export_carries_positions_and_scaling() -> None:
    facts = read_target_facts(EXAMPLE / "target")
    sizes = make.shape(
        hidden_size=7168,
        target_hidden_size=7168,
        target_vocab_size=163840,
        rope_theta=facts.rope_theta,
        rope_scaling=facts.rope_scaling,
    )
    config = eagle3_config(sizes, (2, 30, 58), facts, "bfloat16")
    assert config["max_position_embeddings"] == 262144
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 50000.0,
    }
    assert config["rope_scaling"] == {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
    }


def test_its_server_is_planned_for_eight_gpus() -> None:
    shown = eyas("serve", "start", "--dry-run", "--mode", "capture", "--project", EXAMPLE, "--json").json
    command = shown["command"]
    assert shown["engine"] == "sglang"
    assert command[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    given = {word: command[i + 1] for i, word in enumerate(command[:-1]) if word.startswith("--")}
    assert given["--tensor-parallel-size"] == "8"
    assert given["--mem-fraction-static"] == "0.88"
    assert given["--context-length"] == "8193"  # a whole sample and the one token that is asked for
    assert "--trust-remote-code" in command
    assert "--enable-return-aux-hidden-states" in command
    assert "--return-aux-hidden-state-layer-ids" not in command  # this kind counts the default as eyas does
    config = load_config(EXAMPLE)
    assert config.serve.start_seconds == 900
    assert any(name.startswith("NCCL_") for name in config.serve.environment)
