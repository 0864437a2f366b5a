"""What servers are started with: derived by engine and mode, tables laid over, shown by config show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eyas.base.errors import ConfigError
from eyas.config.load import load_config
from eyas.config.resolve import resolve
from eyas.config.server_arguments import Mode, mode_arguments, words
from eyas.targets.serving.launch import SETTINGS_VARIABLE, Launch, plan_launch
from eyas.targets.serving.plugin_folder import make_plugin_folder
from eyas_engine.settings import SETTINGS_VARIABLE as PLUGIN_VARIABLE
from eyas_engine.settings import EngineSettings
from tests.cli.command import eyas
from tests.targets.serving import projects


def arguments(root: Path, mode: Mode, *overrides: str, drafter: Path | None = None) -> dict[str, Any]:
    config = load_config(root, overrides)
    return mode_arguments(config, resolve(config, root), mode, drafter)


def launch(root: Path, mode: Mode, *overrides: str) -> Launch:
    config = load_config(root, overrides)
    (root / "export").mkdir(exist_ok=True)
    (root / "export" / "config.json").write_text("{}")
    return plan_launch(config, resolve(config, root), mode, root / "export")


def test_vllm(root: Path) -> None:
    projects.make(root, "vllm")
    model = str(root / "target")
    common = {"model": model, "max-model-len": 128}
    assert arguments(root, "generate") == common
    capture = arguments(root, "capture")
    assert capture.pop("no-enable-prefix-caching") is True
    method = capture.pop("speculative-config")
    assert method["method"] == "extract_hidden_states"
    # the aux layers and the state after all 30
    assert method["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}
    assert capture == common | {"max-model-len": 129}
    draft = arguments(root, "draft", "evaluate.num_drafts=4", drafter=Path("/exports/eagle3"))
    assert draft["speculative-config"] == {
        "method": "eagle3",
        "model": "/exports/eagle3",
        "num_speculative_tokens": 4,
    }


def test_sglang_counts_layers_by_their_output(root: Path) -> None:
    projects.make(root, "sglang")
    capture = arguments(root, "capture")
    assert capture["model-path"] == str(root / "target")
    assert capture["context-length"] == 129
    assert capture["speculative-algorithm"] == "EAGLE3"
    assert capture["enable-return-aux-hidden-states"] is True
    assert capture["disable-radix-cache"] is True
    assert "return-aux-hidden-state-layer-ids" not in capture  # both count alike at the default
    other = arguments(root, "capture", "extract.aux_layers=[1, 10, 20]")
    assert other["return-aux-hidden-state-layer-ids"] == [0, 9, 19]
    with pytest.raises(ConfigError, match="cannot be captured by SGLang"):
        arguments(root, "capture", "extract.aux_layers=[0, 10, 20]")
    config = json.loads((root / "target" / "config.json").read_text())
    (root / "target" / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    other = arguments(root, "capture", "extract.aux_layers=[4, 10, 20]")
    assert other["return-aux-hidden-state-layer-ids"] == [4, 10, 20]


def test_tables_are_laid_over_what_is_derived(root: Path) -> None:
    projects.make(root)
    found = arguments(
        root,
        "capture",
        'serve.args={"tensor_parallel_size" = 8, "--max-model-len" = 4096, "disable-log-stats" = true}',
        'serve.args_capture={"no-enable-prefix-caching" = false, "gpu-memory-utilization" = 0.8}',
        'serve.args_draft={"not-for-this-mode" = 1}',
    )
    assert found["tensor-parallel-size"] == 8
    assert found["max-model-len"] == 4096
    line = words(found)
    assert line[line.index("--tensor-parallel-size") + 1] == "8"
    assert line[line.index("--gpu-memory-utilization") + 1] == "0.8"
    assert "--disable-log-stats" in line
    assert "--no-enable-prefix-caching" not in line
    assert "--not-for-this-mode" not in line
    speculative = line[line.index("--speculative-config") + 1]
    assert json.loads(speculative)["method"] == "extract_hidden_states"
    assert words({"ids": [1, 14, 26], "x": {"a": 1}}) == ["--ids", "1", "14", "26", "--x", '{"a":1}']


@pytest.mark.parametrize("key", ["port", "speculative_config", "--model", "kv-transfer-config"])
def test_what_makes_a_server_what_it_is_cannot_be_overridden(root: Path, key: str) -> None:
    projects.make(root)
    with pytest.raises(ConfigError, match="which eyas decides") as caught:
        arguments(root, "generate", f'serve.args={{"{key}" = "x"}}')
    assert f"remove {key} from serve.args" in str(caught.value.hint)


def test_tables_that_cannot_be(root: Path) -> None:
    projects.make(root)
    with pytest.raises(ConfigError, match="serve.args"):
        load_config(root, ["serve.args={x = 2026-01-01}"])
    with pytest.raises(ConfigError) as caught:
        load_config(root, ["serve.replicas=3", 'serve.replica_environment=[{A = "1"}]'])
    assert "1 tables for 3 replicas" in str(caught.value.why)


def test_settings_reach_the_plugin_of_either_engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("SGLANG_PLUGINS", "theirs")
    assert SETTINGS_VARIABLE == PLUGIN_VARIABLE
    for engine in ("vllm", "sglang"):
        projects.make(root, engine)
        planned = launch(root, "capture", "serve.dump_limit=2GB")
        settings = planned.settings(root / "dumps", "1764460800.5")
        variables = planned.variables(0, settings, root / "plugin")
        assert variables["PYTHONPATH"].split(os.pathsep) == [str(root / "plugin"), "/somewhere/else"]
        assert variables["SGLANG_PLUGINS"] == "theirs,eyas"
        command = planned.command(4711, settings)
        assert command[command.index("--port") + 1] == "4711"
        if engine == "vllm":
            transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
            assert transfer["kv_connector_module_path"] == "eyas_engine.vllm_connector"
            table = transfer["kv_connector_extra_config"]["eyas"]
        else:
            table = json.loads(variables[SETTINGS_VARIABLE])
        read = EngineSettings.from_table(table)
        assert (read.directory, read.layers, read.num_layers) == (root / "dumps", (2, 15, 27), 30)
        assert read.limit_bytes == 2 * 10**9
        plain = launch(root, "generate").variables(0, None, None)
        assert SETTINGS_VARIABLE not in plain
        assert plain["PYTHONPATH"] == "/somewhere/else"


def test_replicas_get_their_own_devices(root: Path) -> None:
    tables = '[{CUDA_VISIBLE_DEVICES = "0,1"}, {CUDA_VISIBLE_DEVICES = "2,3"}]'
    projects.make(root, serve=f"replicas = 2\nreplica_environment = {tables}")
    planned = launch(root, "generate")
    seen = [planned.variables(index, None, None)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert seen == ["0,1", "2,3"]


def test_anything_that_changes_a_server_changes_its_digest(root: Path) -> None:
    projects.make(root)
    digest = launch(root, "capture").digest
    assert launch(root, "capture").digest == digest
    for override in (
        "extract.aux_layers=[1, 2, 3]",
        "data.max_seq_len=256",
        'serve.environment={A = "1"}',
        "serve.args={seed = 1}",
        "serve.dump_dir=elsewhere",
    ):
        assert launch(root, "capture", override).digest != digest
    assert launch(root, "generate").digest != digest
    assert launch(root, "capture", "train.lr=1").digest == digest


def test_a_drafter_that_is_not_there(root: Path) -> None:
    projects.make(root)
    config = load_config(root)
    with pytest.raises(ConfigError, match="no exported drafter"):
        plan_launch(config, resolve(config, root), "draft", root / "exports" / "eagle3")


def test_the_plugin_folder_holds_the_package_and_its_entry_point(tmp_path: Path) -> None:
    import importlib.metadata

    folder = make_plugin_folder(tmp_path / "plugin")
    (found,) = importlib.metadata.distributions(name="eyas-engine", path=[str(folder)])
    points = {point.group: point.value for point in found.entry_points}
    assert points == {"sglang.srt.plugins": "eyas_engine.sglang_plugin:load"}
    assert (folder / "eyas_engine" / "vllm_connector.py").is_file()
    assert {p.name.partition("-")[0] for p in folder.iterdir()} == {"eyas_engine"}
    stale = folder / "eyas_engine-0.0.1.dist-info"
    stale.mkdir()
    (folder / "eyas_engine" / "removed.py").write_text("")
    before = (folder / "eyas_engine" / "dump.py").stat().st_mtime_ns
    (folder / "eyas_engine" / "room.py").write_text("edited")
    make_plugin_folder(folder)
    assert not stale.exists()
    assert not (folder / "eyas_engine" / "removed.py").exists()
    assert (folder / "eyas_engine" / "room.py").read_text() != "edited"
    assert (folder / "eyas_engine" / "dump.py").stat().st_mtime_ns == before


def test_config_show_tells_the_arguments_of_each_mode(root: Path) -> None:
    projects.make(root, "sglang")
    shown = eyas("config", "show", "--project", root, "--json").json["servers"]
    assert set(shown) == {"generate", "capture", "draft"}
    assert "--enable-return-aux-hidden-states" in shown["capture"]
    assert "--enable-return-aux-hidden-states" not in shown["generate"]
    plain = eyas("config", "show", "--project", root)
    assert "--context-length 129" in plain.out
