"""The engines' own ways to hand over hidden states: vLLM's stock connector, SGLang's states as JSON.

Each is used as its documents say, and no further: a prompt is asked for, its states are read into memory
and their rows counted, and what lies on the disk is removed. Nothing is checked beyond that, and nothing
is stored.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DESCRIBED = {
    "vllm": "ExampleHiddenStatesConnector; on a CPU a subclass that leaves out pinned memory and CUDA events",
    "sglang": "return_hidden_states as JSON, prompts never cut into chunks; the last state is not in it",
}


@dataclass(frozen=True)
class OwnServer:
    """A server that hands over states in its engine's own way."""

    engine: str
    url: str
    pid: int
    model: str

    async def states(self, client: Any, tokens: Sequence[int]) -> None:
        """One prompt's states, read and let go. Raises SystemExit: rows are missing."""
        path, body = request_of(self.engine, tokens, self.model)
        response = await client.post(path, json=body)
        response.raise_for_status()
        if self.engine == "vllm":
            found = json.loads(response.content)["kv_transfer_params"]["hidden_states_path"]
            rows = await asyncio.to_thread(rows_of_file, Path(found), tokens)
        else:
            rows = await asyncio.to_thread(rows_of_reply, response.content)
        if rows != len(tokens):
            raise SystemExit(f"{self.engine} gave {rows} rows for {len(tokens)} tokens")


def request_of(engine: str, tokens: Sequence[int], model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for the states of a prompt."""
    ids = [int(token) for token in tokens]
    if engine == "vllm":
        return "/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
    sampling = {"max_new_tokens": 1, "temperature": 0}
    return "/generate", {"input_ids": ids, "sampling_params": sampling, "return_hidden_states": True}


def rows_of_file(path: Path, tokens: Sequence[int]) -> int:
    """Rows in a file of the stock connector, read whole once its writer lets go of the lock; then removed."""
    from safetensors.torch import load_file

    lock = path.with_name(path.name + ".lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        found = load_file(path)
    lock.unlink()
    path.unlink()
    if found["token_ids"].tolist() != list(tokens):
        raise SystemExit("vLLM's stock connector gave the states of other tokens")
    return int(found["hidden_states"].shape[0])


def rows_of_reply(content: bytes) -> int:
    """Rows of a prompt in SGLang's reply, made the numbers that training takes."""
    import torch

    reply: Mapping[str, Any] = json.loads(content)
    return int(torch.tensor(reply["meta_info"]["hidden_states"][0], dtype=torch.bfloat16).shape[0])


@contextmanager
def own_server(project: Any, folder: Path, *, last: bool = False) -> Iterator[OwnServer]:
    """Start a server of a project's engine without eyas' plugin, with its states switched on.

    Args:
        folder: for its log; the stock connector's files lie in shared memory.
        last: SGLang returns last states instead of aux states.

    Raises:
        SystemExit: it does not become healthy.
    """
    from eyas.base.clock import SystemClock
    from eyas.base.stop import StopFlag
    from eyas.targets.serving.address import Address
    from eyas.targets.serving.launch import HOST, plan_launch
    from eyas.targets.serving.process import EngineProcess, free_port, log_tail
    from eyas.targets.serving.starting import wait_healthy

    launch = plan_launch(project.config, project.resolved, "generate" if last else "capture", None)
    clock, port, log = SystemClock(), free_port(HOST), folder / f"own-way{'-last' if last else ''}.log"
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else folder) as dumps:
        if launch.engine == "vllm":
            transfer = {
                "kv_connector": "StockConnector",
                "kv_connector_module_path": "stock_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": dumps},
            }
            launch = replace(launch, arguments={**launch.arguments, "kv-transfer-config": transfer})
        else:
            more: dict[str, Any] = {"chunked-prefill-size": -1, "disable-radix-cache": True}
            more |= {"enable-return-hidden-states": True} if last else {}
            launch = replace(launch, arguments={**launch.arguments, **more})
        variables = launch.variables(0, None, None)
        path = [str(Path(__file__).with_name("in_vllm")), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        process = EngineProcess.start(
            launch.command(port, None), variables, folder, log, secrets.token_hex(8)
        )
        try:
            address = Address(f"http://{HOST}:{port}", None)

            def running() -> None:
                if not process.leader_alive:
                    raise SystemExit(f"{launch.engine} ended: {process.how_it_ended()}\n{log_tail(log)}")

            if not wait_healthy(address, project.config.serve.start_seconds, clock, StopFlag(), running):
                raise SystemExit(f"{launch.engine} does not become healthy: {log_tail(log)}")
            yield OwnServer(launch.engine, address.url, process.identity.pid, launch.model)
        finally:
            process.end(project.config.serve.stop_seconds, clock)
