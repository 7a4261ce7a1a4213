"""Processes that belong together: a mark in their environment, which children inherit, or descent."""

from __future__ import annotations

from contextlib import suppress

import psutil

_MARK = "MEMPO_SERVICE"


def mark(name: str) -> dict[str, str]:
    """What the environment of a process holds so that it and all that it starts are ``marked``."""
    return {_MARK: name}


def marked(name: str) -> list[psutil.Process]:
    """Every process of this user with that mark, also one whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == name:
                found.append(process)
    return found


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process or a child of it holds the port: another clone's server must not pass for ours."""
    try:
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for member in [process, *process.children(recursive=True)]
            for connection in member.net_connections("inet")
        )
    except psutil.NoSuchProcess:
        return False


def end(*processes: psutil.Process, patience_s: float = 10.0) -> None:
    """End these and their descendants; what does not go by itself within ``patience_s`` is killed."""
    members = set(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            members.update(process.children(recursive=True))
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for member in members:
            with suppress(psutil.NoSuchProcess):
                stop(member)
        members = set(psutil.wait_procs(members, timeout=patience_s)[1])
