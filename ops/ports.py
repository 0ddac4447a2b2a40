"""Ports of the local stack: one that somebody named must be free, any other is avoided when it is taken."""

from __future__ import annotations

import socket

from shared.errors import ConfigError


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a closed connection that still lingers is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now; the kernel does not hand it out again soon."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def choose_port(field: str, host: str, port: int, *, named: bool) -> int:
    """`port` if it is free, else another one, unless a person `named` it. Port 0 is any.

    Raises ConfigError naming `field` for a named port in use or a host that is not this machine's.
    """
    try:
        another = free_port(host)
    except OSError as error:
        raise ConfigError(
            "serve.host", f"{host} cannot be listened on ({error.strerror})", "Use 127.0.0.1 or 0.0.0.0."
        ) from error
    if port == 0:
        return another
    if port_is_free(host, port):
        return port
    if named:
        raise ConfigError(field, f"port {port} on {host} is in use", "Name another port, or 0 for any free one.")
    return another
