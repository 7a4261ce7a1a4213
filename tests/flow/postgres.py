"""A PostgreSQL server of one's own: on 127.0.0.1, with a password, in a folder that goes with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mempo import services

PASSWORD = "pg-hunter2"


@contextmanager
def postgres() -> Iterator[str]:
    """``postgresql+psycopg2://`` URL of an empty database. Skips where there is no PostgreSQL, or no user for it."""
    pytest.importorskip("psycopg2", reason="the extra postgres is not installed")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("no PostgreSQL in /usr/lib/postgresql")
    # It refuses to run as root; Debian's package brings a user for it.
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="mempo-pg-", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), services.free_port(0)
        (folder / "password").write_text(PASSWORD)
        if user:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)

        def run(program: str, *arguments: str) -> None:
            command = [str(programs[-1] / program), "-D", str(folder / "data"), *arguments]
            done = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

        run("initdb", "--username=mempo", f"--pwfile={folder / 'password'}", "--auth=scram-sha-256", "--no-sync")
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        run("pg_ctl", "start", "--wait", "-o", options, "-l", str(folder / "log"))
        try:
            yield f"postgresql+psycopg2://mempo:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "stop", "--mode=immediate")
