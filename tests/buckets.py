"""A store of S3's kind on 127.0.0.1 for tests: moto's server, and the environment that clients find it by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def server(port: int = 0) -> Any:
    """Not started. What it holds lives as long as this process, whatever server shows it."""
    pytest.importorskip("s3fs", reason="extra s3")
    from moto.server import ThreadedMotoServer

    return ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)


@contextmanager
def serving() -> Iterator[None]:
    running = server()
    running.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port_of(running)}"}).items():
            patch.setenv(name, value)
        _forget_clients()
        yield
    _forget_clients()
    running.stop()


def _forget_clients() -> None:
    """s3fs keeps a client by its arguments, and with it the address that the environment named then."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


def port_of(running: Any) -> int:
    return int(running.get_host_and_port()[1])


def make_bucket(name: str) -> str:
    """Its URL."""
    import boto3

    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"
