"""``eyas bench`` against the fake server, with numbers counted again from its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.targets.fake.drafts import FakeDrafting
from eyas.targets.fake.server import FakeServer
from eyas.targets.local.model import LocalTarget
from tests.browser import browser, looking_at
from tests.cli.command import Finished, eyas
from tests.targets.server.fakes import Engine, fake_server, tiny_server_model
from tests.tiny import save_tiny_target

LIMIT = 17
ROUND_SECONDS = 0.01
ACCEPTS = (2, 0, 3, 1)
PROMPTS = [
    {"id": "1", "domain": "chat", "turns": ["what is the sum of two and three?", "and of four?"]},
    {"id": "2", "domain": "chat", "turns": ["name the river", "name the bridge"]},
    {"id": "3", "domain": "code", "prompt": "write a function"},
    {"id": "4", "domain": "code", "prompt": "def largest(numbers):"},
    {"id": "5", "domain": "tokens", "prompt_ids": [7, 30, 41, 12], "output_ids": [9, 2]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def target(folder: Path) -> LocalTarget:
    return LocalTarget.load(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in PROMPTS))
    return path


@pytest.fixture
def servers(folder: Path, target: LocalTarget) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(engine: Engine, accepts: tuple[int, ...] = (), **more: Any) -> FakeServer:
            drafting = FakeDrafting(3, accepts) if accepts else None
            model = tiny_server_model(target, engine, (1, 3, 5))
            more = {"drafting": drafting, "round_seconds": ROUND_SECONDS, **more}
            return stack.enter_context(fake_server(model, folder, engine, None, **more))

        yield start


def bench(server: FakeServer, prompts: Path, *words: str | Path) -> Finished:
    options = ["--prompts", prompts, "--max-tokens", str(LIMIT), "--json"]
    return eyas("bench", server.url, *options, *words)


class ByTransformers:
    """Answers by transformers alone: number of tokens of every turn, in the order of `PROMPTS`."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def _answer(self, ids: Sequence[int]) -> list[int]:
        with torch.no_grad():
            tokens = list(ids)
            while len(tokens) < len(ids) + LIMIT:
                tokens.append(int(self._model(torch.tensor([tokens])).logits[0, -1].argmax()))
                if tokens[-1] in (0, 2):
                    break
        return tokens[len(ids) :]

    def lengths(self) -> list[int]:
        found = []
        for record in PROMPTS:
            if "prompt_ids" in record:
                found.append(len(self._answer(record["prompt_ids"])))  # type: ignore[arg-type]
                continue
            messages: list[dict[str, str]] = []
            for text in record.get("turns", [record.get("prompt")]):  # type: ignore[union-attr]
                messages.append({"role": "user", "content": str(text)})
                ids = self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
                answer = self._answer(ids)
                found.append(len(answer))
                said = self._tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": said})
        return found


def rounds_of(num_tokens: int) -> list[int]:
    """Accepted drafts of each round behind the first token, counted one by one."""
    accepted, left = [], num_tokens - 1
    while left:
        taken = min(ACCEPTS[len(accepted) % len(ACCEPTS)], left - 1)
        accepted.append(taken)
        left -= taken + 1
    return accepted


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_counts_speed_and_texts(engine: Engine, servers: Any, prompts: Path, folder: Path) -> None:
    drafting, plain = servers(engine, ACCEPTS), servers(engine)
    done = bench(drafting, prompts, "--plain-url", plain.url, "--concurrency", "1")
    assert done.code == 0, done.err
    lengths = ByTransformers(folder).lengths()
    rounds = [accepted for length in lengths for accepted in rounds_of(length)]
    (level,) = done.json["levels"]
    assert done.json["engine"] == engine
    assert done.json["drafts"] is True
    assert done.json["prompts"] == len(PROMPTS)
    for way in ("drafted", "plain"):
        assert level[way]["answers"] == len(lengths) == 7
        assert level[way]["tokens"] == sum(lengths)
        assert level[way]["warnings"] == []
    assert level["drafted"]["rounds"] == len(rounds)
    assert level["drafted"]["acceptance_length"] == pytest.approx(1 + sum(rounds) / len(rounds))
    assert done.json["acceptance_length"] == level["drafted"]["acceptance_length"]
    rates = [sum(accepted > place for accepted in rounds) / len(rounds) for place in range(3)]
    assert level["drafted"]["unconditional_rates"] == pytest.approx(rates)
    assert level["plain"]["acceptance_length"] is None
    assert level["texts"] == {"compared": 7, "equal": 7, "not_compared": 0, "differences": []}
    # a forward pass pretends to take 10 ms; a first token that is seen late makes those behind it seem faster
    pace = 1000 * level["plain"]["seconds_per_token"]["p50"]
    assert 8 <= pace <= 1000 * level["plain"]["seconds"] / sum(lengths) * 2
    assert level["drafted"]["seconds"] >= ROUND_SECONDS * (len(rounds) + len(lengths))
    assert level["plain"]["seconds"] >= ROUND_SECONDS * sum(lengths)
    speeds = [level[way]["tokens_per_second"] for way in ("drafted", "plain")]
    assert level["speedup"] == pytest.approx(speeds[0] / speeds[1])
    assert level["drafted"]["seconds_to_first_token"]["p95"] >= ROUND_SECONDS
    assert level["advice"]["best_num_drafts"] in (1, 2, 3)
    assert len(level["advice"]["choices"]) == 7


def test_each_level_has_prompts_of_its_own(servers: Any, prompts: Path) -> None:
    server = servers("vllm", ACCEPTS, round_seconds=0.0)
    done = bench(server, prompts, "--concurrency", "1,3")
    assert done.code == 0, done.err
    levels = done.json["levels"]
    assert [level["concurrency"] for level in levels] == [1, 3]
    assert sum(level["drafted"]["answers"] for level in levels) == 7
    assert server.requests == 7 + 2  # and one to warm up for each level
    assert "without --plain-url" in " ".join(done.json["notes"])
    few = bench(server, prompts, "--concurrency", "1,3,4")
    assert few.code == 2
    assert few.json["error"] == "UsageError"


def test_table_and_page(servers: Any, prompts: Path, tmp_path: Path) -> None:
    server, plain = servers("vllm", (1, 2), round_seconds=0.0), servers("vllm", round_seconds=0.0)
    page = tmp_path / "bench.html"
    words = ["--prompts", prompts, "--max-tokens", "8", "--plain-url", plain.url, "--plot", page]
    done = eyas("bench", f"{server.url}/v1/", *words)
    assert done.code == 0, done.err
    for text in ("with drafter", "plain", "acceptance length", "texts are equal", "fastest with"):
        assert text in done.out
    html = page.read_text()
    assert html.index("texts are equal") < html.index('id="chart-bench-speed"') < html.index("<thead>")
    data = html.split('<script type="application/json" id="charts">')[1].split("</script>")[0]
    drawn = {chart["id"]: chart for chart in json.loads(data)}
    assert set(drawn) == {"bench-speed", "bench-first", "bench-pace", "bench-rates", "bench-choices"}
    assert [trace["name"] for trace in drawn["bench-speed"]["traces"]] == ["with drafter", "plain"]
    marks = {name: chart["layout"]["xaxis"]["tickvals"] for name, chart in drawn.items()}
    assert marks["bench-speed"] == [1]
    assert marks["bench-rates"] == [1, 2, 3]  # it drafts three at a time
    assert marks["bench-choices"] == list(range(7))
    for chart in drawn:
        assert f'id="chart-{chart}"' in html


def test_the_page_draws_in_a_browser(servers: Any, prompts: Path, tmp_path: Path) -> None:
    server = servers("vllm", (1, 2), round_seconds=0.0)
    page = tmp_path / "bench.html"
    assert bench(server, prompts, "--plot", page).code == 0
    with browser() as started, looking_at(started, page.as_uri(), offline=True) as seen:
        assert seen.wait_until_drawn() == 4
        assert seen.faults == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_without_a_drafter(engine: Engine, servers: Any, prompts: Path) -> None:
    done = bench(servers(engine, round_seconds=0.0), prompts)
    assert done.code == 0, done.err
    assert done.json["acceptance_length"] is None
    assert done.json["drafts"] is False
    assert "serves no drafter" in done.json["notes"][0]
    assert done.json["notes"][1:] == ["beside a server with the drafter, this one is what --plain-url names"]
    shown = eyas("bench", servers(engine, round_seconds=0.0).url, "--prompts", prompts, "--max-tokens", "4")
    assert re.search(r"^\W*1\W+no drafter\b", shown.out, re.MULTILINE), shown.out
    assert "with drafter" not in shown.out
    assert "server no drafter" in shown.err


def test_faults_end_it_with_their_exit_code(servers: Any, prompts: Path) -> None:
    broken = servers("vllm", ACCEPTS, round_seconds=0.0, faults=["500@4"])
    done = bench(broken, prompts)
    assert done.code == 13
    assert done.json["error"] == "ServerUnreachable"
    assert "500" in done.json["what"]
    reset = servers("vllm", ACCEPTS, round_seconds=0.0, faults=["reset@3"])
    assert bench(reset, prompts).code == 13
    both = servers("vllm", ACCEPTS), servers("vllm", ACCEPTS)
    done = bench(both[0], prompts, "--plain-url", both[1].url)
    assert (done.code, done.json["error"]) == (2, "TargetError")
    assert bench(both[0], prompts, "--model", "another").code == 2
    assert eyas("bench", "127.0.0.1:1", "--prompts", prompts).code == 2
    assert eyas("bench", "http://127.0.0.1:1", "--prompts", prompts, "--json").code == 13
    absent = eyas("bench", both[0].url, "--prompts", prompts.with_name("absent"), "--json")
    assert (absent.code, absent.json["error"]) == (2, "DataError")


def test_prompts_too_long_are_counted(servers: Any, prompts: Path) -> None:
    server = servers("vllm", ACCEPTS, round_seconds=0.0, max_tokens=30)
    done = bench(server, prompts)
    assert done.code == 0, done.err
    drafted = done.json["levels"][0]["drafted"]
    assert drafted["refused"] > 0
    assert "refused" in drafted["warnings"][0]


def test_somebody_else_on_the_server_is_seen(servers: Any, prompts: Path, monkeypatch: Any) -> None:
    from eyas.targets.bench import server as module

    server = servers("vllm", ACCEPTS, round_seconds=0.0)
    counted = module.MeasuredServer.counts_after
    calls: list[int] = []

    def with_a_stranger(self: Any, before: Any, tokens: int) -> Any:
        calls.append(tokens)
        if len(calls) == 2:  # after the last answer of ours
            server._drafts._count(500, [0, 0, 0, 0])
        return counted(self, before, tokens)

    monkeypatch.setattr(module.MeasuredServer, "counts_after", with_a_stranger)
    done = bench(server, prompts)
    assert "somebody else uses it" in done.json["levels"][0]["drafted"]["warnings"][0]


def test_an_api_key(servers: Any, prompts: Path, monkeypatch: Any) -> None:
    server = servers("vllm", ACCEPTS, round_seconds=0.0, api_key="secret")
    assert bench(server, prompts).code == 13
    monkeypatch.setenv("BENCH_KEY", "secret")
    assert bench(server, prompts, "--api-key-env", "BENCH_KEY").code == 0
    assert bench(server, prompts, "--api-key-env", "NOT_SET_AT_ALL").code == 2
