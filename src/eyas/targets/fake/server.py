"""The fake server: HTTP in threads, counted requests, and a schedule of faults."""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eyas.base.clock import boot_id
from eyas.targets.fake.as_json import JSON_KINDS, json_information, json_meta
from eyas.targets.fake.drafts import Drafts
from eyas.targets.fake.dumps import Label, States, TinyModel, encode, spoiled, write_dump, write_error
from eyas.targets.fake.faults import Fault, fault_of
from eyas.targets.fake.http import Http, Reply, Reset, error_reply, json_reply
from eyas.targets.fake.settings import FakeSettings
from eyas.targets.local.generate import SamplingSettings

ENGINES = {"vllm": "vllm 0.32.0 (fake)", "sglang": "sglang 0.5.23 (fake)"}
_HANG_SECONDS = 3600.0


class FakeServer:
    """A server in threads of this process; stop it with `close`.

    Attributes:
        caused: faults by kind that were really caused.
        requests: counted requests (captures that name a dump, or answers).
    """

    def __init__(
        self, model: TinyModel, settings: FakeSettings, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.settings, self._model = settings, model
        self.caused: Counter[str] = Counter()
        self.requests = 0
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._flying: dict[str, tuple[int, ...]] = {}
        self._earlier: list[tuple[str, tuple[int, ...]]] = []
        self._closing = threading.Event()
        self._http: Http | None = None
        self._threads: list[threading.Thread] = []
        self.started = ""
        self._drafts = Drafts(model, settings.model_folder, settings.drafting, settings.round_seconds)
        self._listen()

    @property
    def api_key(self) -> str:
        return self.settings.api_key

    @property
    def url(self) -> str:
        scheme = "https" if self.settings.certificate else "http"
        return f"{scheme}://{self._host}:{self._port}"

    def close(self) -> None:
        """Stop listening, break all connections and wait for the threads; may be called again."""
        self._closing.set()
        self._stop_listening()
        for thread in self._threads:
            thread.join(10)

    def revive(self) -> None:
        """Listen again after `die`, as another start of the server."""
        if self._http is None and not self._closing.is_set():
            self._listen()

    def die(self) -> None:
        """Stop listening and break all connections, as a killed process does."""
        self._stop_listening()

    @property
    def listening(self) -> bool:
        return self._http is not None

    def _listen(self) -> None:
        self._http = Http((self._host, self._port), self)
        self._port = self._http.server_address[1]
        if self.settings.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.settings.certificate, self.settings.key)
            self._http.socket = context.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
        self.started = f"{time.time():.6f}"
        if self.settings.dump_folder is not None:
            self._write_owner(self.settings.dump_folder)
        thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _write_owner(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        owner = {
            "eyas_owner": 1, "project": "fake", "pid": os.getpid(), "process_started": 0,
            "server_started": float(self.started), "boot_id": boot_id(), "engine": self.settings.engine,
        }  # fmt: skip
        (folder / "eyas-owner.json").write_text(json.dumps(owner))

    def _stop_listening(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            http.break_all()

    def get(self, path: str) -> Reply:
        """Health and facts."""
        settings = self.settings
        if path == "/health":
            return json_reply({})
        if path == "/v1/models":
            name = settings.served_name
            if any(fault.kind == "wrong-model" and fault.onward for fault in settings.faults):
                name = "another-model"
            root = str(settings.model_folder)
            entry = {
                "id": name, "root": root, "max_model_len": settings.max_tokens, "owned_by": settings.engine
            }  # fmt: skip
            return json_reply({"data": [entry]})
        if path == "/get_model_info" and settings.engine == "sglang":
            return json_reply({"model_path": str(settings.model_folder), "is_generation": True})
        if path in ("/server_info", "/get_server_info") and settings.engine == "sglang":
            told = self._drafts.information()
            if settings.returns:
                told |= json_information(settings.returns, self._model, self.started)
            return json_reply(told)
        if path == "/metrics" and settings.engine == "vllm":
            return Reply(200, self._drafts.metrics().encode(), "text/plain")
        return error_reply(404, "no such path")

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """A capture or an answer. Raises Reset where the connection is to break."""
        if path.startswith("/v1/") and body.get("stream"):
            return self._streamed(path, body)
        if path != {"vllm": "/v1/completions", "sglang": "/generate"}[self.settings.engine]:
            return error_reply(404, "no such path")
        name, tokens = self._asked(body)
        if len(tokens) + 1 > self.settings.max_tokens:
            return error_reply(400, f"a prompt of {len(tokens)} tokens is too long")
        counted = bool(name) == (self.settings.mode == "capture")
        fault: Fault | None = None
        if counted:
            with self._changed:
                self.requests += 1
                fault = fault_of(self.settings.faults, self.requests)
                if name:
                    self._flying[name] = tokens
                self._changed.notify_all()
        try:
            early = self._before(fault)
            if early is not None:
                return early
            if self.settings.returns and body.get("return_hidden_states"):
                return self._hand_over(name, tokens, fault)
            if name and self.settings.mode == "capture":
                return self._capture(name, tokens, fault)
            return self._answer(tokens, body, fault)
        finally:
            with self._changed:
                if name and self._flying.pop(name, None) is not None:
                    self._earlier.append((name, tokens))

    def _streamed(self, path: str, body: dict[str, Any]) -> Reply:
        """An answer in pieces, as chat clients ask for it; of the faults, those that come before work."""
        with self._lock:
            self.requests += 1
            fault = fault_of(self.settings.faults, self.requests)
        early = self._before(fault)
        if early is not None:
            return early
        tokens = self._drafts.prompt(path, body)
        if len(tokens) + 1 > self.settings.max_tokens:
            return error_reply(400, f"a prompt of {len(tokens)} tokens is too long")
        pieces = self._drafts.pieces(tokens, body, self.settings.engine, self.settings.served_name)
        return Reply(200, b"", "text/event-stream", stream=pieces)

    def _asked(self, body: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        """The dump's name (empty: none asked for) and the prompt."""
        if self.settings.engine == "vllm":
            name = ((body.get("kv_transfer_params") or {}).get("eyas") or {}).get("name", "")
            return str(name), tuple(body["prompt"])
        if self.settings.returns:  # it knows nothing of dumps
            asked = bool(body.get("return_hidden_states"))
            return str(body.get("rid", "")) if asked else "", tuple(body["input_ids"])
        custom = body["sampling_params"].get("custom_params") or {}
        return str(custom.get("eyas_name", "")), tuple(body["input_ids"])

    def _cause(self, kind: str) -> None:
        with self._lock:
            self.caused[kind] += 1

    def _before(self, fault: Fault | None) -> Reply | None:
        """Faults that come before any work is done; None to go on."""
        if fault is None:
            return None
        kind, argument = fault.kind, fault.argument
        statuses = {"500": 500, "busy": 503, "refused": 400}
        if kind in statuses:
            self._cause(kind)
            return error_reply(statuses[kind], f"{kind} on order")
        if kind == "garbage":
            self._cause(kind)
            return Reply(200, b"<html>no JSON</html>", "text/html")
        if kind == "hang":
            self._cause(kind)
            self._closing.wait(_HANG_SECONDS)
            raise Reset
        if kind == "slow":
            self._cause(kind)
            self._closing.wait(1.0 if argument is None else argument)
        elif kind == "reset":
            self._cause(kind)
            raise Reset
        elif kind in ("dies", "returns"):
            self._cause(kind)
            if kind == "dies" and self.settings.process_dies:
                os._exit(9)
            later = 1.0 if argument is None else argument
            thread = threading.Thread(target=self._die_for, args=(later if kind == "returns" else None,))
            thread.start()
            self._threads.append(thread)
            thread.join(5)
            raise Reset
        return None

    def _die_for(self, seconds: float | None) -> None:
        self.die()
        if seconds is not None:
            back = threading.Timer(seconds, self.revive)
            back.daemon = True
            back.start()

    def _capture(self, name: str, tokens: tuple[int, ...], fault: Fault | None) -> Reply:
        folder, kind = self.settings.dump_folder, fault.kind if fault is not None else ""
        assert folder is not None
        states = self._model.states(tokens)
        reply_name = "another-model" if kind == "wrong-model" else self.settings.served_name
        echo: dict[str, Any] | None = {
            "protocol": 1, "name": name, "rows": len(tokens), "dir": str(folder),
            "layers": list(states.layers), "last": self._last, "engine": ENGINES[self.settings.engine],
        }  # fmt: skip
        after: list[Callable[[], None]] = []
        if kind not in ("", "slow"):
            self._cause(kind)
        if kind == "no-echo":
            echo = None
        elif kind == "full" and echo is not None:
            echo["error"] = "full: 81% of the folder's filesystem"
        elif kind == "failed":
            write_error(folder, name, "no space left on device")
        elif kind != "no-dump":
            content, age = self._dump(kind, name, tokens, states)
            if kind == "late" and fault is not None:
                seconds = 1.0 if fault.argument is None else fault.argument
                after.append(lambda: self._write_later(seconds, folder, name, content))
            else:
                write_dump(folder, name, content, age_seconds=age)
        reply = self._reply(echo, [states.token], "length", len(tokens), reply_name, None)
        reply.after = after
        return reply

    def _hand_over(self, name: str, tokens: tuple[int, ...], fault: Fault | None) -> Reply:
        """States within the reply."""
        kind = fault.kind if fault is not None and fault.kind in JSON_KINDS else ""
        if kind:
            self._cause(kind)
        if kind == "swapped":
            name, tokens = self._other(name, tokens)
        meta, token = json_meta(self.settings.returns, self._model, name, tokens, kind)
        return json_reply({"text": "", "output_ids": [token], "meta_info": meta})

    @property
    def _last(self) -> str:
        return "before-norm" if self._model.before_norm else "after-norm"

    def _dump(self, kind: str, name: str, tokens: tuple[int, ...], states: States) -> tuple[bytes, float]:
        """Bytes of a dump and how old its file is to look; ``states`` are those of ``tokens``."""
        age, asked = 0.0, tokens
        if kind == "stale":
            with self._lock:
                earlier = self._earlier[-1] if self._earlier else None
            name, tokens = earlier or (name, tokens)
            age = 0.0 if earlier else _HANG_SECONDS
        elif kind == "swapped":
            name, tokens = self._other(name, tokens)
        label = Label(name, ENGINES[self.settings.engine], self._last, boot_id(), self.started)
        held = states if tokens == asked else self._model.states(tokens)
        content = encode(spoiled(kind, held, self._model), label)
        if kind == "half":
            content = content[: len(content) // 2]
        elif kind == "flip":
            content = content[:-20] + bytes([content[-20] ^ 4]) + content[-19:]
        return content, age

    def _other(self, name: str, tokens: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Another request in flight; waits a moment for one, and takes an earlier one if none comes."""

        def others() -> list[tuple[str, tuple[int, ...]]]:
            return [(n, t) for n, t in self._flying.items() if n != name]

        with self._changed:
            self._changed.wait_for(lambda: bool(others()), 0.5)
            found = others() or self._earlier[-1:]
        return found[0] if found else ("somebody-elses-dump", tokens)

    def _write_later(self, seconds: float, folder: Path, name: str, content: bytes) -> None:
        timer = threading.Timer(seconds, lambda: write_dump(folder, name, content))
        timer.daemon = True
        timer.start()

    def _answer(self, tokens: tuple[int, ...], body: dict[str, Any], fault: Fault | None) -> Reply:
        kind = fault.kind if fault is not None else ""
        asked = body if self.settings.engine == "vllm" else body["sampling_params"]
        limit = int(asked["max_tokens" if self.settings.engine == "vllm" else "max_new_tokens"])
        ends = [int(token) for token in asked.get("stop_token_ids") or []]
        temperature = float(asked.get("temperature", 0))
        seed = asked.get("seed" if self.settings.engine == "vllm" else "sampling_seed")
        settings = SamplingSettings(
            limit, ends, temperature, float(asked.get("top_p", 1)), [int(seed or 0)] if temperature else ()
        )
        made = self._model.answer(tokens, settings)
        found, reason = list(made.tokens), str(made.finish_reason)
        matched: int | None = found[-1] if reason == "stop" else None
        name = "another-model" if kind == "wrong-model" else self.settings.served_name
        if kind in ("endless", "cut", "wrong-model"):
            self._cause(kind)
        if kind == "endless" and ends:
            found, reason = [ends[0], *found], reason
        elif kind == "cut":
            plain = (ends[0] + 1) % self._model.target.facts.vocab_size if ends else 0
            found, reason, matched = [*found[:1], plain], "stop", plain
        return self._reply(None, found, reason, len(tokens), name, matched)

    def _reply(
        self,
        echo: dict[str, Any] | None,
        tokens: Sequence[int],
        reason: str,
        num_prompt: int,
        name: str,
        matched: int | None,
    ) -> Reply:
        if self.settings.engine == "vllm":
            choice = {"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": reason,
                      "stop_reason": matched}  # fmt: skip
            usage = {"prompt_tokens": num_prompt, "completion_tokens": len(tokens)}
            parameters = {"eyas": echo} if echo is not None else None
            return json_reply(
                {"model": name, "choices": [choice], "usage": usage, "kv_transfer_params": parameters}
            )
        meta: dict[str, Any] = {
            "finish_reason": {"type": reason, "matched": matched}, "prompt_tokens": num_prompt,
            "completion_tokens": len(tokens),
        }  # fmt: skip
        if echo is not None:
            meta["eyas"] = [json.dumps(echo)]
        return json_reply({"text": "", "output_ids": list(tokens), "meta_info": meta})
