"""HTTP to one server, with everything that can go wrong turned into a fault of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.targets.server.faults import ServerFault
from eyas.targets.server.settings import ClientSettings

_WHOLE_REPLY_SECONDS = 60.0
"""For the rest of a reply after its first byte; replies are small, since states come as files."""
_LOOK_SECONDS = 20.0
"""For health and facts; generous, since a busy server answers slowly."""


@dataclass(frozen=True)
class ServedModel:
    """What a server says that it serves.

    Attributes:
        name: to be sent with requests.
        path: folder or hub name of its weights, as far as it tells.
        max_tokens: longest prompt and answer together; None if it does not say.
    """

    name: str
    path: str
    max_tokens: int | None


class Connection:
    """An open client of one server.

    Args:
        url: without a slash at its end.
    """

    def __init__(self, url: str, settings: ClientSettings) -> None:
        self.url = url
        self._settings = settings
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            verify=settings.verify if url.startswith("https") else False,  # reading certificates takes time
            trust_env=False,  # a proxy for the outside is none for servers of one's own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            timeout=self._timeout(_LOOK_SECONDS),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: Mapping[str, Any], first_byte_seconds: float) -> dict[str, Any]:
        """The JSON object that answers a request. Raises ServerFault."""
        response = await self._send("POST", path, first_byte_seconds, body)
        _require_success(response)
        return _json(response)

    async def post_for_bytes(self, path: str, body: Mapping[str, Any], first_byte_seconds: float) -> bytes:
        """The body that answers a request, unread: states as JSON take long to parse. Raises ServerFault."""
        response = await self._send("POST", path, first_byte_seconds, body)
        _require_success(response)
        return response.content

    async def about(self) -> dict[str, Any]:
        """What an SGLang server says of itself. Raises ServerFault."""
        response = await self._send("GET", "/server_info", _LOOK_SECONDS)
        _require_success(response)
        return _json(response)

    async def health(self) -> None:
        """Return when the server says that it is well. Raises ServerFault."""
        response = await self._send("GET", "/health", _LOOK_SECONDS)
        if response.status_code == 503:
            raise ServerFault("unreachable", "its health is 503: starting, or its engine is dead")
        _require_success(response)

    async def model(self, wanted: str) -> ServedModel:
        """What the server serves under ``wanted``, or its only model when that is empty.

        Raises:
            ServerFault: ``wrong_model`` when it has none of that name.
        """
        response = await self._send("GET", "/v1/models", _LOOK_SECONDS)
        _require_success(response)
        listed = _json(response).get("data")
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        names = [str(entry.get("id")) for entry in entries]
        if wanted and wanted not in names:
            raise ServerFault("wrong_model", f"it serves {', '.join(names) or 'nothing'}, not {wanted}")
        if not wanted and len(entries) != 1:
            raise ServerFault("wrong_model", f"it serves {', '.join(names) or 'nothing'}; name one")
        entry = entries[names.index(wanted) if wanted else 0]
        longest = entry.get("max_model_len")
        return ServedModel(
            name=str(entry["id"]),
            path=await self._path(str(entry.get("root") or entry["id"])),
            max_tokens=int(longest) if isinstance(longest, int) else None,
        )

    async def _path(self, fallback: str) -> str:
        """SGLang tells the folder elsewhere; vLLM does not know the path and gives it as ``root``."""
        try:
            response = await self._send("GET", "/get_model_info", _LOOK_SECONDS)
            return str(response.json()["model_path"]) if response.status_code == 200 else fallback
        except (ServerFault, ValueError, KeyError, TypeError):
            return fallback

    def _timeout(self, first_byte_seconds: float) -> httpx.Timeout:
        return httpx.Timeout(first_byte_seconds, connect=self._settings.connect_seconds, pool=None)

    async def _send(
        self, method: str, path: str, first_byte_seconds: float, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        timeout = self._timeout(first_byte_seconds)
        patience = first_byte_seconds + self._settings.connect_seconds + _WHOLE_REPLY_SECONDS
        try:
            async with asyncio.timeout(patience):
                return await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.ConnectTimeout as error:
            raise ServerFault("unreachable", f"no connection to {self.url} in time") from error
        except httpx.ConnectError as error:
            code = "certificate" if "certificate" in str(error).lower() else "unreachable"
            raise ServerFault(code, f"{self.url}: {error or type(error).__name__}") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ServerFault("hang", f"{self.url} did not reply in {first_byte_seconds:g} s") from error
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            # RuntimeError: this client was closed under the request, since its server is started anew
            raise ServerFault("reset", f"{self.url}: {error or type(error).__name__}") from error


def _require_success(response: httpx.Response) -> None:
    status = response.status_code
    if status == 200:
        return
    codes = {401: "unauthorized", 403: "unauthorized", 404: "not_found", 429: "busy", 503: "busy"}
    code = codes.get(status, "server_error" if status >= 500 else "refused")
    text = " ".join(response.text.split())[:200]
    raise ServerFault(code, f"HTTP {status}: {text}" if text else f"HTTP {status}")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise ServerFault("bad_reply", "the reply is no JSON") from error
    if not isinstance(found, dict):
        raise ServerFault("bad_reply", "the reply is no JSON object")
    return found
