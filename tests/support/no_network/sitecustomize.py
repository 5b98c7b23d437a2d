"""Refuse every connection that leaves this machine, in tests and in the Python processes they start.

Python imports this module when it starts, if its folder is on PYTHONPATH. What is refused raises, and
is noted in the file that PREPARE_TESTS_REFUSED names: a thread or a process may hide the exception.
"""

import ipaddress
import os
import socket
import sys

LOG = "PREPARE_TESTS_REFUSED"


class NetworkRefusedError(OSError):
    """A test tried to reach another machine."""


def is_local(host: object) -> bool:
    """Return whether `host` names this machine; None and an empty host do."""
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if not isinstance(host, str) or host in ("", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def refuse(event: str, arguments: tuple) -> None:
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        sock, address = arguments[:2]
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or not address:
            return
        if event == "socket.connect" and sock.type == socket.SOCK_DGRAM:
            return  # sends nothing; it is how a program asks for its own address
        host = address[0]
    else:
        return
    if not is_local(host):
        if path := os.environ.get(LOG):
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(log, f"{os.getpid()} {event} {host}\n".encode())
            os.close(log)
        raise NetworkRefusedError(f"{event} to {host}: tests may not leave this machine")


# Set where no test runs, a process uses the network as it likes.
if os.environ.get(LOG):
    sys.addaudithook(refuse)
