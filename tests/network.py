"""Every connection that a test opens, by an audit hook for the whole run: each is refused and fails the test."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

EVENTS = {f"socket.{name}" for name in ("connect", "getaddrinfo", "gethostbyname", "sendto", "sendmsg")}
QUIET = ("_OFFLINE", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
HERE = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0", platform.node())  # a browser, the ranks of one machine


class Network:
    """What was refused in this process so far."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.allowed = False  # Ray looks for the address of its own machine
        for name in [name for name in os.environ if name.endswith(QUIET)]:
            del os.environ[name]  # what they keep quiet would ask elsewhere
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or self.allowed or _is_here(event, arguments):
            return
        self.refused.append(f"{event} {arguments!r:.200}")
        raise RuntimeError(f"network: {self.refused[-1]}")


def _is_here(event: str, arguments: tuple[Any, ...]) -> bool:
    by_name = event in ("socket.getaddrinfo", "socket.gethostbyname")
    address = arguments[0] if by_name else arguments[1]
    if isinstance(address, tuple):
        address = address[0]
    elif not by_name:
        return True  # a socket of Unix's own has a path, one that is connected none
    host = address.decode() if isinstance(address, bytes) else address
    return host is None or host in HERE
