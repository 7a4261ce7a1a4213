"""Real vLLM servers, started by `mempo serve`: killed, stale, out of reach; what the engine over them makes of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mempo import proof
from mempo.config import Config
from mempo.engines import Engine, Generation, Sampling, open_engine
from mempo.engines.routing import NoServer
from mempo.packing import chain
from mempo.records import Question, Trajectory
from mempo.rollout import collect
from mempo.runtime import VLLM, Runtime
from tests.served import ROOT, Served, until
from tests.tiny import make_policy

pytestmark = [pytest.mark.server, pytest.mark.slow]
KEY = "not-to-be-seen"
LONG = Sampling(temperature=1.0, max_tokens=100, stop=())


class Nothing:
    async def search(self, query: str) -> str:
        return "Nothing was found."


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        yield


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> list[Path]:
    """Versions 0, 1, 2 of one architecture, all weights different, each with its probe."""
    folder = tmp_path_factory.mktemp("policies")
    made = [make_policy(folder / str(seed), tiny_tokenizer, seed=seed, head_dim=32) for seed in range(3)]
    for version, policy in enumerate(made):
        (policy / "trainer.json").write_text(json.dumps({"policy_version": version}))
        ids = proof.probe_ids(tiny_tokenizer)
        proof.write(policy, ids, open_engine(policy, Runtime()).logprobs([chain(ids, 1)])[0])
    return made


@pytest.fixture(scope="module")
def served(policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    servers = Served(policies[0], tmp_path_factory.mktemp("served"), count=2, key=KEY)
    yield servers
    servers.end()


def opened(policy: Path, *urls: str, deadline_s: float = 300.0) -> Engine:
    return open_engine(policy, Runtime(engine="vllm", vllm=VLLM(servers=urls, deadline_s=deadline_s)))


def generate(engine: Engine, count: int, sampling: Sampling = LONG) -> list[Generation]:
    async def together() -> list[Generation]:
        prompt = list(range(30, 60))
        return await asyncio.gather(*(engine.generate(prompt, seed=seed, sampling=sampling) for seed in range(count)))

    return asyncio.run(together())


def rollouts(engine: Engine) -> list[Trajectory]:
    questions = [Question(f"q{index}", f"What is the capital of {name}?", [["Paris"]], "test")
                 for index, name in enumerate(("France", "Japan"))]  # fmt: skip
    config = Config.model_validate({"rollout": {"max_response_tokens": 120, "max_turns": 3}, "loop": {"group_size": 8}})
    return asyncio.run(collect(engine, Nothing(), questions, config, round_index=0, seed=3))


def tokens(trajectories: list[Trajectory]) -> list[Any]:
    return [(t.key, t.status, [turn.response_ids for turn in t.turns]) for t in trajectories]


def scored(policy: Path, made: Generation) -> list[float]:
    """By another program: transformers."""
    prompt = list(range(30, 60))
    return open_engine(policy, Runtime()).logprobs([chain([*prompt, *made.token_ids], len(prompt))])[0]


def test_new_weights_reach_every_server_and_each_proves_them(served: Served, policies: list[Path]) -> None:
    engine = opened(policies[0], *served.urls)
    assert engine.policy_version == 0
    for version in (1, 2, 0):
        engine.load(policies[version])
        assert engine.policy_version == version
        for url in served.urls:
            one = opened(policies[version], url)
            (made,) = generate(one, 1)
            assert made.logprobs == pytest.approx(scored(policies[version], made), abs=1e-4)
            one.close()
    engine.close()


def test_the_server_that_answers_changes_no_token(served: Served, policies: list[Path]) -> None:
    both, one = opened(policies[1], *served.urls), opened(policies[1], served.urls[0])
    made = generate(both, 16)  # loads the first server anew: `one` gave its weights another name
    assert [g.token_ids for g in made] == [g.token_ids for g in generate(one, 16)]
    both.close()
    one.close()


def test_what_ends_a_turn_comes_over_http(served: Served, policies: list[Path]) -> None:
    engine = opened(policies[0], *served.urls)
    read, reasons = engine.tokenizer.decode, set()
    for made in generate(engine, 32, Sampling(temperature=1.0, max_tokens=20, stop=("e",))):
        *before, last = made.token_ids
        assert made.finish_reason == ("stop" if "e" in read([last]) else "length")
        assert "e" not in read(before) and len(made.token_ids) <= 20
        reasons.add(made.finish_reason)
    assert reasons == {"stop", "length"}
    engine.close()


def test_a_stale_server_stops_the_run(served: Served, policies: list[Path]) -> None:
    opened(policies[2], served.urls[1]).close()
    with forgetful(served.urls[1]) as stale, pytest.raises(proof.StaleWeights, match=f"{stale}: .*policy version 1"):
        opened(policies[1], served.urls[0], stale)
    opened(policies[1], *served.urls).close()


def test_the_key_is_asked_for_and_stands_in_no_log(
    served: Served, policies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(ValueError, match=f"{served.urls[0]}.* gave 401"):  # the probe is the first thing asked
        opened(policies[0], served.urls[0])
    assert all(KEY not in file.read_text() for file in (*served.logs, served.output))


def test_the_client_needs_no_vllm(served: Served, policies: list[Path]) -> None:
    code = f"""
        import asyncio, sys
        sys.modules["vllm"] = None  # importing it fails
        from pathlib import Path
        from mempo.engines import Sampling, open_engine
        from mempo.runtime import VLLM, Runtime
        engine = open_engine(Path({str(policies[0])!r}), Runtime(engine="vllm", vllm=VLLM(servers={served.urls!r})))
        made = asyncio.run(engine.generate([30, 31], seed=1, sampling=Sampling(1.0, 5, stop=())))
        engine.close()
        print(len(made.token_ids))
    """
    program = [sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["5"], done.stderr


def test_a_server_killed_in_mid_rollout_costs_nothing_but_time(served: Served, policies: list[Path]) -> None:
    """The other answers all; the killed one is started again, with the weights it was first given, and gets the
    policy's before it is asked.
    """
    engine = opened(policies[2], *served.urls)
    undisturbed = rollouts(engine)
    victim = served.server(served.urls[0])
    pool = engine._pool  # type: ignore[attr-defined]
    killer = threading.Thread(target=lambda: (until(lambda: len(pool.servers[0].inflight) > 2, 60), victim.kill()))
    killer.start()
    assert tokens(rollouts(engine)) == tokens(undisturbed)
    killer.join()
    assert not victim.is_running() and "died with code -9" in served.text()
    until(lambda: served.text().count(f"{served.urls[0]} is up") == 2, 400)
    until(lambda: generate(engine, 4) is not None and pool.servers[0].ready, 60)
    assert tokens(rollouts(engine)) == tokens(undisturbed)
    engine.close()
    engine = opened(policies[2], served.urls[0])
    (made,) = generate(engine, 1)
    assert made.logprobs == pytest.approx(scored(policies[2], made), abs=1e-4)
    engine.close()


def test_without_a_server_a_step_ends_inside_its_deadline(served: Served, policies: list[Path]) -> None:
    engine = opened(policies[1], served.urls[1], deadline_s=3)
    victim = served.server(served.urls[1])
    victim.kill()
    with pytest.raises(NoServer, match=served.urls[1]):
        rollouts(engine)
    with pytest.raises(NoServer, match=served.urls[1]):
        engine.logprobs([chain([30, 31, 32], 1)] * 10)
    engine.close()
    until(lambda: served.text().count(f"{served.urls[1]} is up") == 2, 400)


def test_serve_ends_with_all_that_it_started(served: Served) -> None:
    family = served.family()
    assert len(family) >= 5  # the command, two servers, their engines
    assert served.end(signal.SIGINT) == 0
    assert psutil.wait_procs(family, timeout=5)[1] == []


class forgetful:
    """A proxy before ``url`` that says that it has loaded weights, and forwards everything else."""

    def __init__(self, url: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.forward("GET", b"")

            def do_POST(self) -> None:
                self.forward("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def forward(self, method: str, body: bytes) -> None:
                status, content = 200, b'{"results": [null]}'
                if self.path != "/collective_rpc":
                    headers = {
                        name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers
                    }
                    answer = httpx.request(method, url + self.path, content=body, headers=headers, timeout=60)
                    status, content = answer.status_code, answer.content
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
