"""What can go wrong with a server, each under one word that ledger, reports and tests count."""

from __future__ import annotations

from typing import Literal

Scope = Literal["sample", "server", "busy"]
"""Whom a fault puts in doubt: the sample it came with (until the server is proven unsound), the server,
or nobody, since the server only asks for a pause."""

FAULTS: dict[str, tuple[Scope, str]] = {
    "unreachable": ("server", "no connection"),
    "reset": ("server", "the connection broke before the reply was whole"),
    "hang": ("server", "no reply within the time that is allowed"),
    "unauthorized": ("server", "the API key is missing or wrong"),
    "certificate": ("server", "the certificate of the server is not trusted"),
    "not_found": ("server", "the server does not know the path or the model"),
    "no_echo": ("server", "the reply lacks the dump's echo: the server was not started for extraction"),
    "for_extraction": ("server", "the server is set up for extraction and must not write answers"),
    "wrong_model": ("server", "the server serves another model"),
    "server_changed": ("server", "the dump was made by another start of the server than the proven one"),
    "no_folder": ("server", "the dump folder is not here"),
    "wrong_states": ("server", "the states are not those of the target at these layers"),
    "busy": ("busy", "the server asks for a pause"),
    "full": ("busy", "the server's dump folder is full"),
    "server_error": ("sample", "the server answered with an error of its own"),
    "refused": ("sample", "the server does not take the request"),
    "bad_reply": ("sample", "the reply is not what the protocol says"),
    "dump_failed": ("sample", "the server could not write the dump"),
    "no_dump": ("sample", "the reply promised a dump and none came"),
    "torn": ("sample", "the dump ends before its header says"),
    "damaged": ("sample", "the dump's header or checksum is wrong"),
    "stale": ("sample", "the dump is of an earlier request"),
    "swapped": ("sample", "the dump is of another request in flight"),
    "foreign": ("sample", "the dump carries a name that was never asked for"),
    "other_tokens": ("sample", "the dump is of other tokens"),
    "rows": ("sample", "rows are missing, as a prefix cache leaves them out"),
    "wrong_layers": ("sample", "the dump holds other layers"),
    "wrong_width": ("sample", "the states have another width"),
    "wrong_dtype": ("sample", "the states have another dtype"),
    "not_a_number": ("sample", "a state is NaN"),
    "infinite": ("sample", "a state is infinite"),
    "all_zero": ("sample", "a layer is all zero"),
    "constant": ("sample", "a row is constant"),
    "other_token": ("sample", "the last state's best token is not the one that the server chose"),
    "bad_answer": ("sample", "an answer that cannot be: empty, too long, or without its end"),
    "died": ("sample", "the server died while this request was alone in flight"),
    "late": ("sample", "the dump came late, and was taken"),
}
"""Code to scope and meaning. ``late`` is only counted: the dump is valid."""


class ServerFault(Exception):
    """One request, health check or dump that went wrong; handled inside the client, never shown raw.

    Args:
        code: a key of `FAULTS`.
        why: what was seen.
        final: the sample is set aside without further tries.
    """

    def __init__(self, code: str, why: str = "", *, final: bool = False) -> None:
        super().__init__(f"{code}: {why or FAULTS[code][1]}")
        self.code = code
        self.why = why or FAULTS[code][1]
        self.final = final

    @property
    def scope(self) -> Scope:
        return FAULTS[self.code][0]
