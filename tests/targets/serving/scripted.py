"""A small process that stands in for an engine: the same addresses and the same words, no model.

It runs on the standard library alone and takes the engines' arguments. The environment makes it
misbehave: SCRIPT_START (seconds until it listens), SCRIPT_DIE (exit code, at once), SCRIPT_MODEL (another
model), SCRIPT_DEAF (ignores SIGTERM), SCRIPT_CHILD (starts a child in a session of its own),
SCRIPT_PLUGIN=0 (the plugin did not load), SCRIPT_DUMP=0 (promises a dump that does not come),
SCRIPT_DUMP=err (its disk is full), SCRIPT_HEALTH (another status).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SCRIPT = os.environ


def arguments(words: list[str]) -> dict[str, str]:
    found, key = {}, ""
    for word in words:
        if word.startswith("--"):
            key = word[2:]
            found[key] = ""
        else:
            found[key] = f"{found[key]} {word}".strip()
    return found


GIVEN = arguments(sys.argv[1:])
VLLM = "model" in GIVEN
MODEL = SCRIPT.get("SCRIPT_MODEL") or GIVEN.get("model") or GIVEN["model-path"]
SPECULATIVE = json.loads(GIVEN.get("speculative-config") or "{}")


def settings() -> dict[str, Any] | None:
    if SCRIPT.get("SCRIPT_PLUGIN") == "0":
        return None
    if VLLM:
        transfer = json.loads(GIVEN.get("kv-transfer-config") or "{}")
        return transfer.get("kv_connector_extra_config", {}).get("eyas")
    text = SCRIPT.get("EYAS_ENGINE_SETTINGS")
    return json.loads(text) if text and "enable-return-aux-hidden-states" in GIVEN else None


def dump(name: str, rows: int) -> dict[str, Any] | None:
    told = settings()
    if told is None:
        return None
    folder = Path(told["directory"])
    if SCRIPT.get("SCRIPT_DUMP") == "err":
        (folder / f"{name}.err").write_text(json.dumps({"name": name, "why": "no space left"}))
    elif SCRIPT.get("SCRIPT_DUMP") != "0":
        (folder / f"{name}.tmp").write_bytes(b"states")
        os.rename(folder / f"{name}.tmp", folder / f"{name}.dump")
    said = {"protocol": 1, "name": name, "rows": rows, "dir": str(folder), "layers": told["layers"]}
    return said | {"last": "before-norm", "engine": "scripted 1"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass

    def _send(self, body: object, status: int = 200) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        key = SCRIPT.get("SCRIPT_KEY")
        if key and self.headers["Authorization"] != f"Bearer {key}" and self.path != "/health":
            return self._send({"error": "who are you?"}, 401)
        if self.path == "/health":
            return self._send("", int(SCRIPT.get("SCRIPT_HEALTH", "200")))
        if self.path == "/v1/models":
            length = int(GIVEN.get("max-model-len") or GIVEN.get("context-length") or 0)
            return self._send({"data": [{"id": MODEL, "root": MODEL, "max_model_len": length}]})
        if self.path == "/get_model_info":
            return self._send({"model_path": MODEL})
        if self.path == "/get_server_info":
            return self._send({"speculative_draft_model_path": GIVEN.get("speculative-draft-model-path")})
        if self.path == "/metrics":
            drafts = SPECULATIVE.get("method") == "eagle3"
            text = "vllm:spec_decode_num_drafts_total 0\nvllm:spec_decode_num_accepted_tokens_total 0\n"
            return self._send(text if drafts else "vllm:request_success_total 0\n")
        return self._send("", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            name = body.get("kv_transfer_params", {}).get("eyas", {}).get("name")
            said = dump(name, len(body["prompt"])) if name else None
            return self._send({"choices": [{"text": "x"}], "kv_transfer_params": said and {"eyas": said}})
        name = body["sampling_params"].get("custom_params", {}).get("eyas_name")
        said = dump(name, len(body["input_ids"])) if name else None
        return self._send({"text": "x", "meta_info": {"eyas": [json.dumps(said)]} if said else {}})


def main() -> None:
    print("scripted engine: the first line", flush=True)
    if SCRIPT.get("SCRIPT_DIE"):
        print("RuntimeError: no kernel image is available", flush=True)
        sys.exit(int(SCRIPT["SCRIPT_DIE"]))
    if SCRIPT.get("SCRIPT_DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if SCRIPT.get("SCRIPT_CHILD"):
        # engines have workers, and one of them may leave the group
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(float(SCRIPT.get("SCRIPT_START", "0")))
    ThreadingHTTPServer((GIVEN["host"], int(GIVEN["port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
