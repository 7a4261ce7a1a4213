"""Trainer ``deepspeed``: torchrun's ranks as a child of this process, commanded through a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mempo import storage
from mempo.config import Lora, LossConfig, Optim
from mempo.records import Sample
from mempo.runtime import Runtime
from mempo.services import ServiceError
from mempo.trainers import Objective
from mempo.trainers.gradient import check_samples
from mempo.trainers.mailbox import Mailbox

START, LOG = "start.json", "log.txt"
LOG_LINES = 30
GRACE_S = 10.0


class DeepSpeedTrainer:
    """See ``Trainer``. The weights live in the ranks (``deepspeed_worker``); this process holds none."""

    def __init__(
        self,
        policy: Path,
        optim: Optim,
        loss: LossConfig,
        runtime: Runtime,
        *,
        temperature: float = 1.0,
        adapter: Lora = Lora(),
    ) -> None:
        if find_spec("deepspeed") is None:
            raise ValueError("runtime.trainer: deepspeed is not installed; pip install 'mempo[deepspeed]' brings it")
        if runtime.device not in ("cpu", "cuda"):
            raise ValueError(f"runtime.device: the trainer deepspeed takes cpu or cuda, not {runtime.device!r}")
        folder = Path(tempfile.mkdtemp(prefix="mempo-deepspeed-"))
        sections = {"optim": optim, "loss": loss, "runtime": runtime, "adapter": adapter}
        start = {name: section.model_dump(mode="json") for name, section in sections.items()}
        storage.write_json(folder / START, start | {"policy": str(policy), "temperature": temperature})
        self._mailbox, self._number = Mailbox(folder), 0
        self._child = _start(folder, runtime)
        self._end = weakref.finalize(self, _end, self._child, folder)
        try:
            self._mailbox.reply(0, self._check)  # the ranks have read the policy
        except BaseException:
            self.close()
            raise

    def step(self, samples: Sequence[Sample], *, objective: Objective = "policy") -> dict[str, float]:
        """See ``TorchTrainer.step``; the statistics are those of all ranks."""
        return self._ask("step", {"samples": samples}, objective=objective)

    def alignment(self, first: Sequence[Sample], second: Sequence[Sample]) -> dict[str, float]:
        """See ``Trainer``."""
        return self._ask("alignment", {"first": first, "second": second})

    def save(self, folder: Path, *, policy_version: int) -> None:
        """See ``Trainer``. Any trainer, with any number of ranks and at any stage, goes on from the folder."""
        self._ask("save", {}, folder=str(folder.absolute()), policy_version=policy_version)

    def close(self) -> None:
        """End the ranks. They also end by themselves with this process, however it ends."""
        self._end()

    def _ask(self, call: str, samples: dict[str, Sequence[Sample]], **options: str | int) -> dict[str, float]:
        for part in samples.values():
            check_samples(part)
        self._number += 1
        self._mailbox.ask(self._number, call, samples, **options)
        return self._mailbox.reply(self._number, self._check)

    def _check(self) -> None:
        code = self._child.poll()
        if code is not None:
            lines = (self._mailbox.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
            end = "\n".join(lines[-LOG_LINES:])
            raise ServiceError(f"trainer deepspeed: its ranks ended (code {code}); the end of their log:\n{end}")


def _start(folder: Path, runtime: Runtime) -> subprocess.Popen[bytes]:
    """The ranks inherit standard input, a pipe: at its end, which comes with this process's, they end."""
    command = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(runtime.deepspeed.ranks)]
    # They meet through files: torchrun's other stores listen on every interface of the machine.
    command += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file,is_host=1"]
    command += ["--rdzv-endpoint", str(folder / "agents"), "--rdzv-id", "ranks", "--log-dir", str(folder)]
    command += ["-m", "mempo.trainers.deepspeed_worker", str(folder)]
    settings = {"DS_ACCELERATOR": runtime.device, "OMP_NUM_THREADS": str(runtime.num_threads)}
    settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # All ranks are on this machine: nothing of theirs goes over its network.
    settings |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for this process, which then ends them in order
        )


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    assert child.stdin is not None
    child.stdin.close()
    for end in (child.terminate, child.kill):
        try:
            child.wait(GRACE_S)
            break
        except subprocess.TimeoutExpired:
            end()
    child.wait()
    shutil.rmtree(folder, ignore_errors=True)
