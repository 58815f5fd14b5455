"""No network, at import or at run time. conftest.py fails any test in which this process asks for it."""

from __future__ import annotations

import importlib
import pkgutil
import socket
from collections.abc import Callable

import pytest
from tests.network import Network

import noisescope


def send() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as out:
        out.sendto(b"x", ("192.0.2.1", 9))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: socket.create_connection(("192.0.2.1", 9), timeout=0.1),
        lambda: socket.getaddrinfo("noisescope.invalid", 80),
        lambda: socket.gethostbyname("noisescope.invalid"),
        send,
    ],
)
def test_a_question_to_the_network_is_refused_and_kept(ask: Callable[[], object], network: Network) -> None:
    """A library that goes on without an answer has asked all the same."""
    with pytest.raises(RuntimeError, match=r"network: socket\."):
        ask()
    assert len(network.refused) == 1
    network.refused.clear()


@pytest.mark.filterwarnings("ignore")
def test_no_module_asks_when_it_is_imported() -> None:
    """All of them, with what they import; what was imported before was seen, too."""
    names = [one.name for one in pkgutil.walk_packages(noisescope.__path__, "noisescope.")]
    names = [name for name in names if not name.endswith(("__main__", "lm_eval", "cuda_noise", "cuda_kernels"))]
    assert len(names) > 150
    for name in names:
        importlib.import_module(name)
