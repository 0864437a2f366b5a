"""Small requests to a server: is it up, what does it serve, how was it started."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.base.errors import ServerUnreachable


@dataclass(frozen=True)
class Address:
    """Where a server is and how to be let in.

    Args:
        url: ``http://host:port`` without a slash at the end.
        api_key: sent as a bearer token.
        ca_file: certificates to trust for https; empty: the system's.
    """

    url: str
    api_key: str | None = None
    ca_file: str = ""

    def client(self, timeout: float) -> httpx.Client:
        """A client that asks this server only; proxies of the environment do not apply."""
        # reading the system's certificates takes longer than a request, and waiting asks twice a second
        verify: ssl.SSLContext | bool = (
            ssl.create_default_context(cafile=self.ca_file) if self.ca_file else self.url.startswith("https")
        )
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, verify=verify, trust_env=False
        )

    def get(self, path: str, timeout: float = 10.0) -> httpx.Response:
        """One GET. Raises httpx.HTTPError, also when nobody listens."""
        with self.client(timeout) as client:
            return client.get(path)

    def json(self, path: str, body: object = None, timeout: float = 60.0) -> Any:
        """The JSON answer to a GET, or to a POST of ``body``.

        Raises:
            ServerUnreachable: no answer, another status than 200, or no JSON.
        """
        try:
            with self.client(timeout) as client:
                reply = client.get(path) if body is None else client.post(path, json=body)
            if reply.status_code != 200:
                raise ServerUnreachable(
                    f"the server answers {reply.status_code}", where=self.url + path, why=reply.text[:500]
                )
            return reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerUnreachable(
                "the server does not answer", where=self.url + path, why=f"{type(error).__name__}: {error}"
            ) from error

    def text(self, path: str, timeout: float = 30.0) -> str:
        """The text answer to a GET. Raises ServerUnreachable as `json` does."""
        try:
            reply = self.get(path, timeout)
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                "the server does not answer", where=self.url + path, why=f"{type(error).__name__}: {error}"
            ) from error
        if reply.status_code != 200:
            raise ServerUnreachable(f"the server answers {reply.status_code}", where=self.url + path)
        return reply.text

    def health(self, timeout: float = 5.0) -> str:
        """``ok``, ``refused`` (nobody listens), ``failing`` (an error), or ``silent`` (no answer in time)."""
        try:
            status = self.get("/health", timeout).status_code
        except httpx.TimeoutException:
            return "silent"
        except httpx.HTTPError:
            return "refused"
        return "ok" if status == 200 else "failing"
