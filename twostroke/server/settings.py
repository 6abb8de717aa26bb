"""The server's configuration."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidConfig, shown

DEFAULT_MAX_WAITING = 2048
"""The engine's `max_waiting` where it is not given: a server that is sent more than it can do must say so."""

MAX_API_PROCESSES = 64
"""More than any engine keeps busy."""

API_KEY_VARIABLE = "TWOSTROKE_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """All settings of the server that are not the engine's. Checked by `validate`.

    Attributes:
        host, port: where to listen; port 0 is any free one.
        model_name: what clients call the model.
        api_keys: any of them opens the API; without one it is open to all who reach it.
        admin_keys: any of them opens what is done to the engine; without one there are no such endpoints.
        allow_origins: web origins whose pages may call the API (CORS); `*` is all.
        ssl_certfile, ssl_keyfile: PEM files, for TLS.
        max_samples: samples of one request, over all of its prompts.
        max_body_bytes: bytes of a request's body.
        request_timeout: seconds that a request may take; None is for ever.
        shutdown_timeout: seconds that requests are given to end after SIGTERM; those left are cancelled.
        restart: start the engine process again when it has died.
        api_processes: processes that answer HTTP, in front of one engine process.
        otlp_traces_endpoint: URL to which traces of requests are sent, by OTLP over HTTP; None: there are none.
        gpu_price: what an hour of the GPU costs, in any currency; None where that is not known.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "smollm2-135m"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_samples: int = 128
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    restart: bool = False
    gpu_price: float | None = None
    api_processes: int = 1
    otlp_traces_endpoint: str | None = None

    def validate(self) -> None:
        """Raise `InvalidConfig` for the first setting that is out of its range; the message names it and its value."""
        for name, low, high in (
            ("port", 0, 65535),
            ("max_samples", 1, None),
            ("max_body_bytes", 1, None),
            ("shutdown_timeout", 0, None),
            ("api_processes", 1, MAX_API_PROCESSES),
        ):
            value = getattr(self, name)
            if not value >= low or (high is not None and value > high):
                raise InvalidConfig(f"{name}={shown(value)} must be {f'in [{low}, {high}]' if high else f'>= {low}'}")
        if self.api_processes > 1 and sys.platform != "linux":
            raise InvalidConfig(
                f"api_processes={self.api_processes} needs Linux: no other system shares a port's connections out"
            )
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise InvalidConfig(f"request_timeout={shown(self.request_timeout)} must be > 0")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise InvalidConfig(f"otlp_traces_endpoint={shown(endpoint)} must begin with http:// or https://")
        if self.gpu_price is not None and not 0 <= self.gpu_price < math.inf:
            raise InvalidConfig(f"gpu_price={shown(self.gpu_price)} must be a number >= 0")
        if {*self.api_keys} & {*self.admin_keys}:
            raise InvalidConfig("api_keys and admin_keys must have no key in common")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidConfig("ssl_certfile and ssl_keyfile need each other")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise InvalidConfig(f"{name}={shown(str(path))}: no such file")


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys of a file, one a line, and that of the environment variable TWOSTROKE_API_KEY.

    Raises:
        InvalidConfig: the file cannot be read, or has no key.
    """
    keys = [os.environ[API_KEY_VARIABLE]] if os.environ.get(API_KEY_VARIABLE) else []
    return (*keys, *_read_keys("api_key_file", file))


def read_admin_keys(file: Path | None, *, api_key_file: Path | None) -> tuple[str, ...]:
    """Return the keys of a file, one a line; None has none.

    Raises:
        InvalidConfig: the file cannot be read, has no key, or has one that `read_api_keys` has too.
    """
    keys = _read_keys("admin_key_file", file)
    if {*keys} & {*read_api_keys(api_key_file)}:
        users = API_KEY_VARIABLE + ("" if api_key_file is None else f" or api_key_file={shown(str(api_key_file))}")
        raise InvalidConfig(f"admin_key_file={shown(str(file))} has a key that opens the API too, by {users}")
    return keys


def _read_keys(name: str, file: Path | None) -> tuple[str, ...]:
    """`name` is what the setting is called."""
    if file is None:
        return ()
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{name}={shown(str(file))} cannot be read: {error}") from error
    if not any(lines):
        raise InvalidConfig(f"{name}={shown(str(file))} has no key")
    return tuple(line for line in lines if line)
