"""params.yaml: what is refused, with which words, and what wins over what."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo.config import Advantage, Config, Scoring, digest
from mempo.params import ConfigError, checked, load_config

# Nine times nine times ... of the same list: written out it would fill the memory.
LAUGHS = (
    "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)) + "loop: *a29"
)

ROOT = Path(__file__).parents[2]


def load(tmp_path: Path, text: str, *overrides: str, policy: str | None = None) -> Config:
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides, policy=policy)


def refused(tmp_path: Path, text: str, *overrides: str, policy: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides, policy=policy)
    return str(caught.value)


def test_the_projects_own_file_is_good() -> None:
    path = Path(__file__).parents[2] / "params.yaml"
    config = load_config(path)
    for name in config.policies:
        load_config(path, policy=name)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("loop: {group_sise: 8}", "loop.group_sise", "group_size"),
        ("lop: {group_size: 8}", "lop", "loop"),
        ("mem_reward: {treshold: 0.5}", "mem_reward.treshold", "threshold"),
        ("advantage: {std_flor: 0.1}", "advantage.std_flor", "std_floor"),
        ("suites: {s: {dataset: {}}}", "suites.s.dataset", "datasets"),
        ("suites: {s: {datasets: {d: {source: jsonl, fles: [a]}}}}", "suites.s.datasets.d.fles", "files"),
        ("data: {train: {files: [{pth: a}]}}", "data.train.files.0.pth", "path"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_right_one(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    assert f"{key}: unknown key; did you mean {nearest}?" in refused(tmp_path, text).splitlines()


def test_a_key_like_no_other_lists_what_is_known(tmp_path: Path) -> None:
    message = refused(tmp_path, "search: {zzzz: 1}")
    assert "search.zzzz: unknown key; known: cache_size, corpus, deadline_s, index, " in message


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, "loop: {group_sise: 8, num_rounds: 0}\noptim: {beta1: 1.0}")
    assert {line.split(":")[0] for line in message.splitlines()} == {
        "loop.num_rounds",
        "loop.group_sise",
        "optim.beta1",
    }


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("loop: {group_size: 0}", "loop.group_size"),
        ("loop: {num_rounds: -1}", "loop.num_rounds"),
        ("loop: {num_rounds: 2.5}", "loop.num_rounds"),
        ("rollout: {temperature: 0}", "rollout.temperature"),
        ("mem_reward: {threshold: 1}", "mem_reward.threshold"),
        ("mem_reward: {kind: ratio}", "mem_reward.kind"),
        ("optim: {learning_rate: .nan}", "optim.learning_rate"),
        ("optim: {learning_rate: .inf}", "optim.learning_rate"),
        ("optim: {learning_rate: fast}", "optim.learning_rate"),
        ("data: {heldout: 1.0}", "data.heldout"),
        ("data: {max_hops: 4}", "data.max_hops"),
        ("loop: 3", "loop"),
        ("loop: [1, 2]", "loop"),
        ("preset: mine", "preset"),
    ],
)
def test_values_out_of_range_are_named(tmp_path: Path, text: str, key: str) -> None:
    assert refused(tmp_path, text).startswith(f"{key}: ")


@pytest.mark.parametrize(("written", "value"), [("1e-6", 1e-6), ("1E-6", 1e-6), ("1.0e-06", 1e-6), ("0.000001", 1e-6)])
def test_scientific_notation_is_a_number(tmp_path: Path, written: str, value: float) -> None:
    assert load(tmp_path, f"optim: {{learning_rate: {written}}}").optim.learning_rate == value
    assert load(tmp_path, "{}", f"optim.learning_rate={written}").optim.learning_rate == value


def test_yes_and_no_are_words_not_booleans(tmp_path: Path) -> None:
    # YAML 1.1 would read a model folder called "no" as false.
    assert load(tmp_path, "model: {path: no}").model.path == "no"


def test_training_refuses_a_cut_distribution(tmp_path: Path) -> None:
    assert "top_p < 1" in refused(tmp_path, "rollout: {top_p: 0.9}")
    assert "top_k > 0" in refused(tmp_path, "rollout: {top_k: 20}")


def test_a_correction_needs_recomputed_logprobs(tmp_path: Path) -> None:
    message = refused(tmp_path, "loss: {sampler_correction: token}")
    assert message.startswith("loss.sampler_correction: token needs loss.old_logprobs: recomputed")
    load(tmp_path, "loss: {sampler_correction: token, old_logprobs: recomputed}")
    assert refused(tmp_path, "loss: {sampler_cap: 0.5}").startswith("loss.sampler_cap: ")
    assert refused(tmp_path, "loss: {max_mismatch: 0}").startswith("loss.max_mismatch: ")
    assert load(tmp_path, "loss: {max_mismatch: null}").loss.max_mismatch is None


def test_vllm_scores_at_temperature_one_alone(tmp_path: Path) -> None:
    text = "runtime: {engine: vllm}\nloss: {kl_coef: 0.1}\nrollout: {temperature: 0.6}\n"
    assert "and loss.kl_coef: 0.1 needs it at rollout.temperature: 0.6" in refused(tmp_path, text)
    for wrong, right in (("vllm", "hf"), ("kl_coef: 0.1", "old_logprobs: recomputed"), ("0.6", "1.0")):
        load(tmp_path, text.replace(wrong, right))


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        ("http://127.0.0.1:8000", "runtime.vllm.servers: expected a list, as in runtime.vllm.servers: [http://127"),
        ("[127.0.0.1:8000]", "runtime.vllm.servers.0: expected http:// or https://, a host, a port up to 65535"),
        ("['http://h:8000/v1']", "runtime.vllm.servers.0: expected http:// or https://"),
        ("['http://h:1', 'http://h:65536']", "runtime.vllm.servers.1: expected http:// or https://"),
        ("['http://h:0']", "runtime.vllm.servers.0: expected http:// or https://"),
        ("['http://h?key=secret']", "runtime.vllm.servers.0: expected http:// or https://"),
        (
            "['http://me:secret@h:1']",
            "runtime.vllm.servers.0: no user and password in a URL; the environment's VLLM_",
        ),
        ("['http://h', 'http://H:80/']", "runtime.vllm.servers.1: this server stands in the list already"),
    ],
)
def test_servers_that_are_none_are_refused_and_no_secret_is_told(tmp_path: Path, servers: str, told: str) -> None:
    message = refused(tmp_path, "{}", f"runtime.vllm.servers={servers}")
    assert message.startswith(told) and "secret" not in message


def test_servers_are_kept_as_they_are_written(tmp_path: Path) -> None:
    urls = ("http://127.0.0.1:8000", "https://gpu.example/", "http://[::1]:65535", "http://127.0.0.1:8001")
    assert load(tmp_path, f"runtime: {{vllm: {{servers: {list(urls)}}}}}").runtime.vllm.servers == urls


def test_a_context_that_cannot_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    text = "model: {window: 255}\nsearch: {max_observation_tokens: 64}\nrollout: "
    text += "{max_prompt_tokens: 64, max_response_tokens: 64}"
    assert "up to 256 tokens" in refused(tmp_path, text)  # 64 + 2 * 64 + 64
    load(tmp_path, text, "model.window=256")
    load(tmp_path, text, "model.path=some/folder")  # its window is known when it is opened


def test_the_full_context_asks_for_no_memory(tmp_path: Path) -> None:
    assert "format.require_memory" in refused(tmp_path, "rollout: {context: full}")
    config = load(tmp_path, "rollout: {context: full}\nformat: {require_memory: false}")
    assert config.system == config.prompt.system_full


def test_overrides_win_over_policy_over_preset_over_file(tmp_path: Path) -> None:
    text = "loop: {group_size: 4}\npolicies: {grpo: {advantage: {mem_weight: 0.0}, loop: {group_size: 6}}}"
    assert load(tmp_path, text).loop.group_size == 4
    assert load(tmp_path, text, "preset=published").loop.group_size == 16
    assert load(tmp_path, text, "preset=published", policy="grpo").loop.group_size == 6
    assert load(tmp_path, text, "preset=published", "loop.group_size=2", policy="grpo").loop.group_size == 2


def test_a_policy_changes_its_own_sections_alone(tmp_path: Path) -> None:
    text = "loop: {num_rounds: 3}\npolicies: {mempo: {}, grpo: {advantage: {mem_weight: 0.0}}}"
    grpo, mempo = load(tmp_path, text, policy="grpo"), load(tmp_path, text, policy="mempo")
    assert (grpo.uses_memory_reward, mempo.uses_memory_reward) == (False, True)
    assert grpo.model_copy(update={"advantage": mempo.advantage, "policies": mempo.policies}) == mempo


def test_an_unknown_policy_is_named_with_the_nearest(tmp_path: Path) -> None:
    text = "policies: {mempo: {}, grpo: {}}"
    assert refused(tmp_path, text, policy="grop") == "policies.grop: no such policy; did you mean grpo?"


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/b", ".hidden", "", "-x", "A", "a b", "a.b", "a\\nb", "a\\0b", "warmstart", "é", "a" * 61]
)
def test_a_policy_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    assert refused(tmp_path, f'policies: {{"{name}": {{}}}}').startswith("policies: ")
    load(tmp_path, "policies: {mempo_2-b: {}}", policy="mempo_2-b")


@pytest.mark.parametrize("section", ["data: {seed: 1}", "model: {}", "warmstart: {}", "evaluation: {}", "policies: {}"])
def test_what_all_policies_share_is_no_policys_own(tmp_path: Path, section: str) -> None:
    assert refused(tmp_path, f"policies: {{x: {{{section}}}}}").startswith(
        f"policies.x.{section.split(':')[0]}: one for"
    )


def test_a_policy_may_be_the_published_one(tmp_path: Path) -> None:
    text = "mem_reward: {mask: shared}\npolicies: {mempo: {}, theirs: {preset: published, loop: {group_size: 4}}}"
    theirs = load(tmp_path, text, policy="theirs")
    assert (theirs.mem_reward.mask, theirs.mem_reward.answer_tokens) == ("independent", "last_four")
    assert (theirs.loss.old_logprobs, theirs.loop.group_size) == ("recomputed", 4)
    assert load(tmp_path, text, policy="mempo").mem_reward.mask == "shared"


def test_a_policy_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    for text in ("policies: [mempo]", "policies: {mempo: 3}", "policies: {mempo: null}", "policies: {1: {}}"):
        assert refused(tmp_path, text).startswith("policies")


def test_a_misspelt_key_inside_a_policy_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, "policies: {a: {loop: {group_sise: 8}}}", policy="a")
    assert "loop.group_sise" in message and "group_size" in message


def test_the_preset_sets_every_published_switch(tmp_path: Path) -> None:
    text = "mem_reward: {empty: skip, mask: shared, ill_formed: drop}\nadvantage: {pool: batch, unit_variance: true}\n"
    text += "reward: {kind: f1}\nscoring: {full_scorer: reference, lookahead: 2, aliases: best, baseline: seen}"
    text += "\nloss: {old_logprobs: recomputed, sampler_correction: sequence}"
    config = load(tmp_path, text, "preset=published")
    assert config.loss.sampler_correction == "none"
    assert config.scoring == Scoring() and config.mem_reward.ill_formed == "keep"
    assert not config.advantage.unit_variance
    assert (config.mem_reward.empty, config.mem_reward.mask, config.mem_reward.answer_tokens) == (
        "one", "independent", "last_four",
    )  # fmt: skip
    assert (config.advantage.pool, config.reward.kind, config.loss.old_logprobs) == ("question", "em", "recomputed")


@pytest.mark.parametrize(
    "override", ["loop", "=3", "loop.num_rounds", "loop.num_rounds.deep=1", "loop.num_rounds=[", "a.b=1"]
)
def test_bad_overrides_are_refused(tmp_path: Path, override: str) -> None:
    assert refused(tmp_path, "loop: {num_rounds: 3}", override)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just a sentence",
        "[1, 2]",
        "loop: {num_rounds: 3",
        "loop: {num_rounds: 3}\nloop: {num_rounds: 4}",
        "!!python/object/apply:os.system ['touch hacked']",
        "loop: !!python/object/apply:os.system ['touch hacked']",
        "loop: &a [*a]",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nloop: *c",
        "loop: {? [1, 2] : 3}",
        "1: {2: 3}",
        "loop:\n\tnum_rounds: 3",
        "---\nloop: {}\n---\nloop: {}",
        "\x00",
        "[" * 3000,
        LAUGHS,
        "loop: {num_rounds: " + "9" * 5000 + "}",
    ],
    ids=range(17),
)
def test_hostile_files_are_refused_with_the_projects_own_error(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(tmp_path, text)
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"], "nothing in the file was run"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("model: {path: \xfc}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        load_config(tmp_path / "latin.yaml")


def test_the_memory_weight_falls_over_absolute_rounds() -> None:
    advantage = Advantage(mem_weight=0.8, anneal_rounds=4)
    assert [advantage.weight_at(index) for index in (0, 1, 2, 4, 9)] == pytest.approx([0.8, 0.6, 0.4, 0.0, 0.0])
    assert Advantage(mem_weight=0.8).weight_at(100) == 0.8


def test_the_configuration_is_frozen_and_its_digest_is_of_its_values() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.loop.num_rounds = 3  # type: ignore[misc]
    same = digest({"b": 1, "a": 2})
    assert same == digest({"a": 2, "b": 1}) and len(same) == 8
    assert same != digest({"a": 2, "b": 1.5})


@pytest.mark.parametrize("file", sorted([ROOT / "params.yaml", *ROOT.glob("params/*/params.yaml")]), ids=str)
def test_a_configuration_that_was_written_down_is_read_back(file: Path) -> None:
    """As run folders, shards and overrides do: every key is there then, defaults too."""
    config = load_config(file)
    assert checked(config.model_dump(mode="json")) == config
