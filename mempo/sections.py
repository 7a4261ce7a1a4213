"""What every section of params.yaml is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]

# scheme, host, port, path
_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:]+\]|[^/?#\s:@\[\]]+)(?::([0-9]{1,5}))?(/[^?#\s]+)?/?")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


def checked_name(name: str, section: str, *, taken: tuple[str, ...] = ()) -> str:
    """``name``, which becomes that of folders, files and Prefect artifacts. Raises ``ValueError``."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,59}", name) or name in taken:
        reserved = f", and {' and '.join(taken)} are taken" if taken else ""
        raise ValueError(f"{section}: {name!r}: small letters, digits, - and _ make a name{reserved}")
    return name


def server_urls(urls: Any, key: str, form: str, *, example: str, path: bool) -> tuple[str, ...]:
    """``urls`` as they are written, with a path or without. Raises ``ValueError`` that tells ``form`` and ``example``.

    No message repeats a URL: there may be a secret in it.
    """
    as_in = f"as in {key}: [{example}]"
    if not isinstance(urls, list | tuple):
        raise ValueError(f"{key}: expected a list, {as_in}")
    servers = [_server(str(url), path) for url in urls]
    for place, server in enumerate(servers):
        if server is None:
            raise ValueError(f"{key}.{place}: expected {form}, {as_in}")
        if server in servers[:place]:
            raise ValueError(f"{key}.{place}: this server stands in the list already")
    return tuple(map(str, urls))


def _server(url: str, path: bool) -> tuple[str, int, str] | None:
    """Host, port and path; None where it is no URL, and where there is a path though none is asked for, or none."""
    if (found := _URL.fullmatch(url)) is None:
        return None
    scheme, host, written, rest = found.groups(default="")
    port = int(written or {"http": 80, "https": 443}[scheme])
    return (host.lower(), port, rest) if 0 < port <= 65535 and bool(rest) == path else None
