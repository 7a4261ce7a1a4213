"""Prefect tasks and tracking. Local defaults are settled here, before any module below imports prefect or mlflow."""

from mempo import local

local.settle()
