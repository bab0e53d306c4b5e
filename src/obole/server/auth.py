"""Tenants: whose request it is, told by its API key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from obole.errors import ConfigError
from obole.server.errors import ApiError

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """One API key. `label` is for logs, `index` for metrics; `salt` keeps its cache apart, and nobody outside knows it."""

    index: int
    label: str
    salt: str


class Tenants:
    """Who may come in. Without keys everybody is the same tenant, whose salt is empty."""

    def __init__(self, keys: Iterable[tuple[str, str]], secret: bytes) -> None:
        """`keys`: (label, key). Raises `ConfigError` for a key that is there twice."""
        self._secret = secret
        self._known: dict[bytes, Tenant] = {}
        for index, (label, key) in enumerate(keys):
            digest = self._digest(key)
            if digest in self._known:
                raise ConfigError(f"The API key of tenant {label} is there twice: give each tenant its own.")
            self._known[digest] = Tenant(index, label, hmac.new(secret, b"salt" + key.encode(), hashlib.sha256).hexdigest())
        self.all: tuple[Tenant, ...] = tuple(self._known.values()) or (Tenant(0, "everybody", ""),)

    def of(self, headers: dict[bytes, bytes]) -> Tenant:
        """The tenant of a request, by `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises `ApiError` (401)."""
        if not self._known:
            return self.all[0]
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not key:
            raise ApiError(401, "An API key is needed: send it as Authorization: Bearer KEY.", code="missing_api_key")
        # What is compared is a keyed digest: how long that takes tells nothing about the keys.
        tenant = self._known.get(self._digest(key.decode("utf-8", "surrogateescape")))
        if tenant is None:
            raise ApiError(401, "This API key is not known here.", code="invalid_api_key")
        return tenant

    def _digest(self, key: str) -> bytes:
        return hmac.new(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()


def read_keys(keys: Iterable[str], file: Path | None) -> list[tuple[str, str]]:
    """(label, key) of every tenant. A line of the file is a key, or a label and a key; `#` begins a remark.

    Raises `ConfigError` for a file that cannot be read, has a line of three words or more, or no key at all.
    """
    found = [(f"tenant-{place}", key) for place, key in enumerate(keys)]
    if file is None:
        return found
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"The key file {file} cannot be read ({error}).") from None
    given = len(found)
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if len(words) > 2:
            raise ConfigError(f"{file}, line {number}: write a key, or a label and a key.")
        if words:
            found.append((words[0] if len(words) == 2 else f"tenant-{len(found)}", words[-1]))
    if len(found) == given:
        raise ConfigError(f"The key file {file} has no keys: write one on a line.")
    return found


def read_secret(file: Path | None) -> bytes:
    """The secret behind the salts: from the file, which is made if it is not there, or a new one. Raises `ConfigError`."""
    if file is None:
        return secrets.token_bytes(SECRET_BYTES)
    try:
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            secret = file.read_bytes()
        else:
            with os.fdopen(handle, "wb") as made:
                secret = secrets.token_bytes(SECRET_BYTES)
                made.write(secret)
    except OSError as error:
        raise ConfigError(f"The secret file {file} cannot be used ({error.strerror}).") from None
    if len(secret) < SECRET_BYTES:
        raise ConfigError(f"The secret file {file} has fewer than {SECRET_BYTES} bytes: remove it, and it is made anew.")
    return secret
