"""Small projects on the real engines; skipped aloud where these or the small target are missing."""

from __future__ import annotations

import json
from pathlib import Path

from tests.targets.serving import projects
from tests.targets.serving.engines import real_target, serve_table

THINGS = ["rain", "a bird", "the hill", "a river", "stone", "a cloud", "the north", "a boat"]


def write_project(root: Path, engine: str, *, count: int = 10) -> Path:
    """A small project whose servers eyas starts; float32 everywhere."""
    table = serve_table(engine, 'dump_dir = "dumps"')
    root.mkdir(parents=True)
    lines = [
        json.dumps({"turns": [f"Write two sentences about {THINGS[i % len(THINGS)]} and the number {i}."]})
        for i in range(count)
    ]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (root / "eyas.toml").write_text(
        f'format = 1\n[target]\nmodel = "{real_target()}"\nkind = "{engine}"\n'
        'dtype = "float32"\ndevice = "cpu"\n'
        '[data]\nmax_seq_len = 256\nvalidation = 0.4\n[[data.sources]]\npath = "prompts.jsonl"\n'
        "[regenerate]\nmax_new_tokens = 24\nbatch_size = 5\n"
        '[store]\ndtype = "float32"\nsegment_seconds = 0.5\n'
        '[train]\nepochs = 3\nsteps = 3\nbatch_tokens = 512\ndtype = "float32"\nvalidations = 1\n'
        "[evaluate]\nmax_new_tokens = 24\ntiming_prompts = 0\n"
        f'{table}TEST_ROOT = "{root}"\n'  # by which what is left is found
    )
    return root


def end_servers(root: Path) -> None:
    """End whatever servers a test left."""
    projects.end_all(root)
