"""What extraction is measured with: random samples, and projects whose servers run on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.on_cpu import serve_on_cpu


def serve_table(engine: str, arguments: argparse.Namespace) -> str:
    """The ``[serve]`` table of ``--serve``, or the one for a CPU with the engine of ``--python``."""
    if arguments.serve is not None:
        return str(arguments.serve.read_text())
    return serve_on_cpu(engine, Path(arguments.python))


def make_samples(num_tokens: int, model: Path) -> list[Any]:
    """Random tokens in lengths as chats have them; two thirds of each are an answer."""
    import numpy as np

    from eyas.config.target_facts import read_target_facts
    from eyas.store.samples import Sample, sample_id

    vocab_size = read_target_facts(model).vocab_size
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    while sum(len(sample.tokens) for sample in samples) < num_tokens:
        length = int(np.clip(random.lognormal(5.3, 0.7), 24, 1024))
        tokens = random.integers(0, vocab_size, length).astype(np.int32)
        spans, name = ((length // 3, length),), f"random-{len(samples)}"
        samples.append(
            Sample(
                sample_id(tokens, spans), tokens, spans, name, "random", "random", "train", "stop", "given"
            )
        )
    return samples


def make_project(
    root: Path, engine: str, arguments: argparse.Namespace, samples: Sequence[Any], more_arguments: str = ""
) -> Any:
    """A project with these samples prepared; ``more_arguments`` are lines of ``serve.args``."""
    from eyas.base.seal import sealed_folder
    from eyas.stages.project import Project
    from eyas.store.samples import write_samples

    root.mkdir(parents=True)
    text = serve_table(engine, arguments).replace("[serve.args]\n", f"[serve.args]\n{more_arguments}")
    (root / "eyas.toml").write_text(
        f'format = 1\n[target]\nmodel = "{arguments.model.resolve()}"\nkind = "{engine}"\n'
        f'dtype = "{arguments.dtype}"\n[[data.sources]]\npath = "none.jsonl"\n[regenerate]\nenabled = false\n'
        f"[data]\nmax_seq_len = 2048\n[client]\ntokens_in_flight = {arguments.in_flight}\n{text}"
    )
    project = Project.open(root)
    with sealed_folder(project.layout.samples, {"num_samples": len(samples)}) as inside:
        write_samples(inside, samples)
    return project
