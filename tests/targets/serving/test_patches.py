"""Edits of an engine's source, on a made-up package: applied, verified by hash, restored, drift named."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from eyas.base.errors import ConfigError, DamageFound, TargetError
from eyas.config.servers import ServeConfig
from eyas.targets.serving.patches import Patches
from eyas.targets.serving.unified_diff import DiffDoesNotApply, apply_diff
from tests.cli.command import eyas
from tests.targets.serving import projects

BEFORE = "def capture(layer):\n    return None\n\n\ndef other():\n    return 1\n"
AFTER = "def capture(layer):\n    return layer\n\n\ndef other():\n    return 1\n"
DIFF = """--- a/engine/hooks.py
+++ b/engine/hooks.py
@@ -1,5 +1,5 @@
 def capture(layer):
-    return None
+    return layer
 
 
 def other():
"""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_engine(folder: Path, text: str = BEFORE, version: str = "1.2.3") -> Path:
    """A package as pip leaves it, found through PYTHONPATH."""
    package = folder / "made_up_engine"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('importing an engine is slow and may fail')\n")
    (package / "hooks.py").write_text(text)
    for old in folder.glob("*.dist-info"):
        shutil.rmtree(old)
    information = folder / f"made_up_engine-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: made-up-engine\nVersion: {version}\n"
    )
    (information / "top_level.txt").write_text("made_up_engine\n")
    return package / "hooks.py"


def declare(folder: Path, **changes: str) -> Patches:
    (folder / "hooks.diff").write_text(DIFF)
    patch = {
        "name": "hooks",
        "package": "made_up_engine",
        "file": "hooks.py",
        "diff": "hooks.diff",
        "sha256_before": sha256(BEFORE),
        "sha256_after": sha256(AFTER),
    }
    serve = ServeConfig.model_validate({"patches": [patch | changes]})
    return Patches(serve, folder, folder / "state" / "patches")


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    )
    return make_engine(tmp_path / "site")


def test_apply_and_restore(tmp_path: Path, hooks: Path) -> None:
    hooks.chmod(0o640)
    copy = tmp_path / "linked"
    os.link(hooks, copy)  # an installer's cache may share the file
    patches = declare(tmp_path)
    view = patches.look("hooks")
    assert (view.state, view.path, view.version) == ("not applied", str(hooks), "1.2.3")
    assert patches.apply("hooks").state == "applied"
    assert hooks.read_text() == AFTER
    assert stat.S_IMODE(hooks.stat().st_mode) == 0o640
    assert copy.read_text() == BEFORE
    assert patches.apply("hooks").state == "applied"  # again: nothing to do
    assert patches.restore("hooks").state == "not applied"
    assert hooks.read_text() == BEFORE
    assert patches.restore("hooks").state == "not applied"


def test_drift_is_named_and_left_alone(tmp_path: Path, hooks: Path) -> None:
    patches = declare(tmp_path)
    patches.apply("hooks")
    upgraded = AFTER + "# of the next version\n"
    make_engine(tmp_path / "site", upgraded, "1.3.0")
    assert patches.look("hooks").state == "drifted"
    for change in (patches.apply, patches.restore):
        with pytest.raises(TargetError, match="drifted") as caught:
            change("hooks")
        for told in ("version 1.3.0", sha256(upgraded), sha256(BEFORE), sha256(AFTER), "to version 1.2.3"):
            assert told in str(caught.value.why)
        assert hooks.read_text() == upgraded


def test_a_missing_file_or_package(tmp_path: Path, hooks: Path) -> None:
    for changes in ({"file": "nothing.py"}, {"package": "no_such_package_at_all"}):
        patches = declare(tmp_path, **changes)
        assert patches.look("hooks").state == "missing"
        with pytest.raises(TargetError, match="no file to change"):
            patches.apply("hooks")


def test_a_diff_that_gives_something_else_changes_nothing(tmp_path: Path, hooks: Path) -> None:
    with pytest.raises(ConfigError, match="another file than it declares"):
        declare(tmp_path, sha256_after=sha256("something else")).apply("hooks")
    patches = declare(tmp_path)
    (tmp_path / "hooks.diff").write_text(DIFF.replace("return None", "return nothing"))
    with pytest.raises(ConfigError, match="cannot be applied"):
        patches.apply("hooks")
    assert hooks.read_text() == BEFORE
    assert not (tmp_path / "state").exists()


def test_a_damaged_original_is_not_put_back(tmp_path: Path, hooks: Path) -> None:
    patches = declare(tmp_path)
    patches.apply("hooks")
    kept = tmp_path / "state" / "patches" / "hooks" / "original"
    kept.write_text(BEFORE + "x")
    with pytest.raises(DamageFound, match="original of patch hooks"):
        patches.restore("hooks")
    assert hooks.read_text() == AFTER


def test_a_patch_stays_within_its_package(tmp_path: Path, hooks: Path) -> None:
    (tmp_path / "site" / "outside.py").write_text(BEFORE)
    with pytest.raises(ConfigError, match="leaves its package"):
        declare(tmp_path, file="../outside.py").apply("hooks")
    with pytest.raises(ConfigError, match="no patch 'other'"):
        declare(tmp_path).look("other")


def test_the_verbs(tmp_path: Path, hooks: Path) -> None:
    root = projects.make(tmp_path / "project")
    (root / "hooks.diff").write_text(DIFF)
    with open(root / "eyas.toml", "a") as file:
        file.write(
            '[[serve.patches]]\nname = "hooks"\npackage = "made_up_engine"\nfile = "hooks.py"\n'
            f'diff = "hooks.diff"\nsha256_before = "{sha256(BEFORE)}"\nsha256_after = "{sha256(AFTER)}"\n'
        )

    def state(verb: str, *more: str) -> str:
        done = eyas("serve", "patch", verb, *more, "--project", root, "--json")
        assert done.code == 0, done.err
        return str(done.json["patches"][0]["state"])

    assert state("status") == "not applied"
    assert state("apply", "--dry-run") == "not applied"
    assert state("apply", "hooks") == "applied"
    assert hooks.read_text() == AFTER
    assert state("restore") == "not applied"
    assert eyas("serve", "patch", "apply", "nothing", "--project", root).code == 2
    plain = eyas("serve", "patch", "status", "--project", root)
    assert "not applied" in plain.out
    assert "next: eyas serve patch apply" in plain.err


@pytest.mark.parametrize("seed", range(30))
def test_diffs_apply_as_the_diff_program_made_them(tmp_path: Path, seed: int) -> None:
    if shutil.which("diff") is None:
        pytest.skip("there is no diff program here")
    draw = random.Random(seed)
    old = [
        draw.choice(["alpha", "beta", "", "  gamma", "-minus", "+plus", "@@ at"])
        for _ in range(draw.randrange(60))
    ]
    new = list(old)
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(new) + 1)
        if draw.random() < 0.5 and place < len(new):
            del new[place]
        else:
            new.insert(place, f"new {draw.randrange(5)}")
    ends = [draw.choice(["", "\n"]) for _ in range(2)]
    texts = ["\n".join(lines) + (end if lines else "") for lines, end in zip((old, new), ends, strict=True)]
    for name, text in zip(("old", "new"), texts, strict=True):
        (tmp_path / name).write_text(text)
    made = subprocess.run(["diff", "-u", "old", "new"], cwd=tmp_path, capture_output=True, text=True)
    if not made.stdout:
        pytest.skip("both texts are the same")
    assert apply_diff(texts[0], made.stdout) == texts[1]
    with pytest.raises(DiffDoesNotApply):
        apply_diff(texts[0] + "\nmore", made.stdout.replace("@@ -", "@@ -9"))


def test_no_diff_at_all() -> None:
    for text in ("", "not a diff", json.dumps({}), "--- a\n+++ b\n"):
        with pytest.raises(DiffDoesNotApply):
            apply_diff(BEFORE, text)
    with pytest.raises(DiffDoesNotApply, match="cut off"):
        apply_diff(BEFORE, "\n".join(DIFF.splitlines()[:6]) + "\n")
