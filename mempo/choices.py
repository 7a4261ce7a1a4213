"""Choices that params.yaml and the command line share: apart, or every command would start with pydantic."""

from __future__ import annotations

from typing import Literal

Layout = Literal["hotpotqa", "musique", "2wiki", "flashrag", "verl", "jsonl"]
