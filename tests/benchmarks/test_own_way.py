"""The engines' own ways: what is read of a stock dump and of a JSON reply, and what is refused."""

from __future__ import annotations

import asyncio
import fcntl
import json
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from benchmarks.serving.own_way import OwnServer, rows_of_file, rows_of_reply
from safetensors.torch import save_file


def stock_file(path: Path, tokens: list[int], rows: int) -> None:
    """As vLLM's stock connector leaves one, its lock file beside it."""
    states = {"hidden_states": torch.zeros(rows, 4, 8), "token_ids": torch.tensor(tokens)}
    save_file(states, path)
    path.with_name(path.name + ".lock").touch()


def test_a_stock_file_is_read_when_its_writer_lets_go_and_then_removed(tmp_path: Path) -> None:
    path, tokens = tmp_path / "cmpl-1.safetensors", [5, 6, 7]
    lock = tmp_path / "cmpl-1.safetensors.lock"
    held = lock.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def write() -> None:
        time.sleep(0.2)
        stock_file(path, tokens, 3)
        held.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert rows_of_file(path, tokens) == 3
    writer.join()
    assert list(tmp_path.iterdir()) == []


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cmpl-1.safetensors"
    stock_file(path, [5, 6, 8], 3)
    with pytest.raises(SystemExit, match="other tokens"):
        rows_of_file(path, [5, 6, 7])


def reply(rows: int) -> bytes:
    """As SGLang answers: the prompt's rows first, then those of what it wrote."""
    return json.dumps({"meta_info": {"hidden_states": [[[0.5] * 24] * rows, [0.25] * 24]}}).encode()


def test_rows_of_a_reply() -> None:
    assert rows_of_reply(reply(5)) == 5


@pytest.mark.parametrize("rows", [2, 3])
def test_a_chunk_that_is_missing_ends_the_measurement(rows: int) -> None:
    server = OwnServer("sglang", "http://server", 1, "model")
    answers = httpx.MockTransport(lambda request: httpx.Response(200, content=reply(rows)))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=answers, base_url=server.url) as client:
            await server.states(client, [5, 6, 7])

    if rows == 3:
        asyncio.run(ask())
    else:
        with pytest.raises(SystemExit, match="2 rows for 3 tokens"):
            asyncio.run(ask())
