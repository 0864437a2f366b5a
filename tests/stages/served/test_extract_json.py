"""Extraction through a pair of SGLang servers of others that return states as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.targets.local.model import LocalTarget
from tests.stages.served.helping import LAYERS, counts_of, extract, num_samples, require_true_states
from tests.targets.server.fakes import fake_server, tiny_server_model


def test_a_whole_extraction_and_words_that_cannot_be(project: Path, target: Path, model: LocalTarget) -> None:
    tiny = tiny_server_model(model, "sglang", LAYERS)
    with (
        fake_server(tiny, target, "sglang", None, ["short@3"], returns="aux") as aux,
        fake_server(tiny, target, "sglang", None, ["500@5"], returns="last") as last,
    ):
        urls, last_urls = (("--set", f'serve.{key}=["{server.url}"]')
                           for key, server in (("urls", aux), ("last_urls", last)))  # fmt: skip
        swapped = ("--set", f'serve.urls=["{last.url}"]', "--set", f'serve.last_urls=["{aux.url}"]')
        wrong = extract(project, "sglang", *swapped)
        assert wrong.code == 2, wrong.err
        assert "has to return aux states" in wrong.err
        alone = extract(project, "sglang", *urls)
        assert alone.code == 2, alone.err
        assert "plugin is not loaded" in alone.err
        assert extract(project, "vllm", *urls, *last_urls).code == 2
        one = extract(project, "sglang", "--set", f'serve.last_urls=["{last.url}"]')
        assert one.code == 2
        assert "one beside each of the 0" in one.err
        assert aux.caused == last.caused == {}
        done = extract(project, "sglang", *urls, *last_urls)
        assert done.code == 0, done.err
        assert "(JSON) gives valid states; every layer" in done.err
        assert (aux.caused, last.caused) == ({"short": 1}, {"500": 1})
    assert counts_of(project)["stored"] == num_samples(project)
    assert require_true_states(project, target) == num_samples(project)


@pytest.mark.parametrize("down", ["aux", "last"])
def test_one_of_the_two_is_away(down: str, project: Path, target: Path, model: LocalTarget) -> None:
    tiny = tiny_server_model(model, "sglang", LAYERS)
    with (
        fake_server(tiny, target, "sglang", None, returns="aux") as aux,
        fake_server(tiny, target, "sglang", None, returns="last") as last,
    ):
        (aux if down == "aux" else last).die()
        words = ("--set", f'serve.urls=["{aux.url}"]', "--set", f'serve.last_urls=["{last.url}"]')
        done = extract(project, "sglang", *words, "--set", "serve.start_seconds=1")
    assert done.code == 13, done.err
    assert (aux if down == "aux" else last).url in done.err
