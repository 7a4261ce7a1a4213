"""params.yaml as typed, frozen sections: an unknown key, a bad range, a context that cannot fit stops the program here.

Section = class here = DVC ``params:`` entry.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mempo.choices import Layout
from mempo.runtime import Runtime
from mempo.sections import Count, NonNegative, Section, Share, checked_name, server_urls
from mempo.sources import SPLITS, Phase, QuestionFile, Split
from mempo.suite import Suite, SuiteName

# Raise by one whenever a change of the code changes results: old run folders are then never taken for new ones.
SCHEMA = 5


# Policies that no round has trained: the model at model.path, and what the demonstrations made of it.
UNTRAINED = ("pretrained", "warmstart")
# Sections that name policies and comparisons: no part of what one run is told, or recorded by.
OF_MANY = {"policies", "ablate", "suites"}


def _policy_name(name: str) -> str:
    return checked_name(name, "policies", taken=UNTRAINED)


def _store(url: str | None) -> str | None:
    # No message repeats the URL: there may be a secret in it.
    if url is not None and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^@?#\s]+", url):
        raise ValueError(
            "storage.url: expected a URL as in s3://bucket/prefix or file:///mnt/shared, without user, password or "
            "query: credentials stand in the environment"
        )
    return url


def _layouts(files: Iterable[QuestionFile], source: str | None) -> set[str | None]:
    return {file.source or source for file in files}


def _retrievers(urls: Any) -> tuple[str, ...]:
    form = "a whole address with a port up to 65535, without user, password or query"
    return server_urls(urls, "search.urls", form, example="http://127.0.0.1:8001/retrieve", path=True)


PolicyName = Annotated[str, AfterValidator(_policy_name)]
Context = Literal["memory", "full", "none", "recent", "think"]
Mix = Literal["easy", "hard", "general"]


class Data(Section):
    """``geo``, the world that is built in, or a layout of question files; the warm start teaches on ``geo`` either way.

    ``corpus``: documents to search, null: the paragraphs of the question files. ``max_rejected``: the share of a file's
    rows that may be unusable. ``ordinals``: what names the objectives of ``geo``'s questions, 0: first, second and so
    on; n: for each question some of the first n ordinals, so that few objectives teach the words of many.
    """

    source: Literal["geo", Layout] = "geo"
    seed: int = 0
    num_countries: Count = 188
    num_cities: Count = 500
    max_cities_per_country: Count = 20
    max_name_tokens: Count = 2
    mix: Mix = "easy"
    num_train: Count = 4096
    num_dev: Count = 128
    num_test: Count = 512
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.2
    max_hops: Annotated[int, Field(ge=1, le=3)] = 3
    max_objectives: Annotated[int, Field(ge=1, le=4)] = 4
    ordinals: Annotated[int, Field(ge=0, le=10)] = 0
    train: Split = Split()
    dev: Split = Split()
    test: Split = Split()
    corpus: Annotated[str, Field(min_length=1)] | None = None
    max_rejected: Share = 0.01

    @model_validator(mode="after")
    def _files_for_datasets_alone(self) -> Data:
        if self.source == "geo":
            given = [f"data.{name}" for name in SPLITS if getattr(self, name) != Split()]
            given += ["data.corpus"] * (self.corpus is not None)
            if given:
                raise ValueError(f"{given[0]}: does nothing where data.source is geo")
        elif missing := [name for name in SPLITS if name not in self.splits]:
            raise ValueError(f"data.{missing[0]}.files: no file named, data.source: {self.source} reads each split's")
        return self

    @property
    def splits(self) -> dict[str, Split]:
        """Those that are made of question files."""
        found: dict[str, Split] = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in found.items() if split.files}


class Model(Section):
    """``path``: a local folder or hub id; null builds a small policy from scratch with the sizes below."""

    path: str | None = None
    vocab_size: Annotated[int, Field(ge=300)] = 3072
    hidden_size: Count = 128
    intermediate_size: Count = 256
    num_layers: Annotated[int, Field(ge=2)] = 3
    num_heads: Count = 4
    window: Count = 1024

    @model_validator(mode="after")
    def _whole_heads(self) -> Model:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} does not divide into {self.num_heads} heads of an even size"
            )
        return self


class Prompt(Section):
    """``system`` under the context rules ``memory`` and ``none``; ``system_full`` under ``full`` and ``recent``.

    One warm start teaches all rules, and the system prompt tells the policy which of them it is under.
    """

    system: str = "You are a helpful assistant."
    system_full: str = "You are a helpful assistant with the full history."
    system_think: str = "You are a helpful assistant that remembers its thoughts."


class Format(Section):
    require_memory: bool = True


class Warmstart(Section):
    """``num_steps`` optimiser steps, of which a policy from scratch spends the first ``copy_steps`` on copying alone.

    ``num_steps`` 0 takes the starting policy as it is: the format is then taught by the reward alone.
    Of the demonstrations, ``drop_oldest`` lose their oldest memory item once; ``forget`` is the chance of any older
    item in any rewrite, ``wrong_field`` that of any answer read from a document.
    """

    seed: int = 0
    num_steps: Annotated[int, Field(ge=0)] = 1800
    copy_steps: Annotated[int, Field(ge=0)] = 300
    batch_size: Count = 32
    learning_rate: Annotated[float, Field(gt=0)] = 2e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    reshuffle_every: Count = 4
    drop_oldest: Share = 0.5
    forget: Share = 0.02
    wrong_field: Share = 0.03
    probe_share: Share = 0.2
    full_context_share: Share = 0.25
    think_share: Share = 0.0
    num_threads: Count = 2
    save_every: Count = 200


class Search(Section):
    """``index``: a folder of ``mempo index``; null: BM25 over the data's corpus in memory. ``urls``: Search-R1 servers
    that are asked instead; ``corpus`` names what they search, for results depend on that and not on where they are.

    One request may take ``deadline_s``, and is repeated ``retries`` times before the trajectory is ``tool_failed``.
    ``cache_size``: observations of servers that are remembered by query.
    """

    top_k: Count = 1
    max_observation_tokens: Count = 64
    index: str | None = None
    urls: Annotated[tuple[str, ...], BeforeValidator(_retrievers)] = ()
    corpus: str | None = None
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    retries: Annotated[int, Field(ge=0, le=20)] = 4
    cache_size: Annotated[int, Field(ge=0)] = 10_000

    @model_validator(mode="after")
    def _one_place(self) -> Search:
        if self.urls and self.index:
            raise ValueError("search.index: the servers of search.urls are asked, and have their own")
        if bool(self.urls) != bool(self.corpus):
            raise ValueError(
                "search.corpus: names what the servers of search.urls search (wiki-18 with E5, say): "
                "set both or neither"
            )
        return self


class Rollout(Section):
    """``context``: what a turn sees, see ``prompts.context``; ``recent_turns``: how many turns under ``recent``."""

    context: Context = "memory"
    recent_turns: Count = 2
    max_turns: Count = 8
    max_prompt_tokens: Count = 128
    max_response_tokens: Count = 64
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    block_questions: Count = 8

    @model_validator(mode="after")
    def _whole_distribution(self) -> Rollout:
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError("training refuses top_p < 1 and top_k > 0: the log-probs would be of another distribution")
        return self

    @property
    def kept_turns(self) -> int:
        """The turns that the next one sees, where the context does not grow."""
        return self.recent_turns if self.context == "recent" else 1


class Scoring(Section):
    """What the scoring pass asks: each of these needs forward passes of its own (``mempo rescore --score``).

    ``full_scorer``: whose weights give p_full, the sampling policy's or the frozen starting policy's; the latter costs
    the actor's pass too, which tells the drift. ``lookahead`` k: p_mem is the discounted mean over j = 1..k of
    p(answer | first prompt, memory, observations of turns t..t+j-1). ``aliases``: p of the first wording of the answer,
    of the most probable on each side, or the mean over up to ``probes.MAX_PROBES`` wordings.
    """

    mode: Literal["packed", "padded"] = "packed"
    baseline: Literal["history", "seen"] = "history"
    full_scorer: Literal["actor", "reference"] = "actor"
    lookahead: Annotated[int, Field(ge=0, le=8)] = 0
    aliases: Literal["first", "best", "mean"] = "first"


class Reward(Section):
    kind: Literal["em", "em_mean", "f1"] = "em"
    normalizer: Literal["auto", "squad", "unicode"] = "auto"
    format_credit: Share = 0.0
    require_format: bool = True


class MemReward(Section):
    """From stored log-probabilities to the reward, see ``mem_reward``.

    ``ill_formed``: whether the memory of a turn that is not well-formed has a signal.
    """

    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.5
    quantile: Annotated[float, Field(ge=0, lt=1)] | None = None
    mask: Literal["independent", "shared", "none"] = "independent"
    average: Literal["geometric", "arithmetic"] = "geometric"
    empty: Literal["one", "zero", "skip"] = "one"
    kind: Literal["difference", "log_ratio", "p_mem", "compression", "increment"] = "difference"
    separators: bool = True
    answer_tokens: Literal["offsets", "last_four"] = "offsets"
    reward_cap: Annotated[float, Field(gt=0)] | None = None
    length_penalty: NonNegative = 0.0
    max_mem_tokens: Count = 128
    return_horizon: Annotated[int, Field(ge=0)] = 0
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    ill_formed: Literal["keep", "drop"] = "keep"

    @model_validator(mode="after")
    def _every_value_counts(self) -> MemReward:
        if self.quantile is not None and self.mask == "none":
            raise ValueError("mem_reward.quantile: nothing is filtered where mem_reward.mask is none")
        if not self.separators and self.answer_tokens == "last_four":
            raise ValueError(
                "mem_reward.separators: the rule mem_reward.answer_tokens: last_four cannot leave them out"
            )
        return self

    @property
    def reads_p_full(self) -> bool:
        """Whether the full side has a say in the reward: in the comparison, or in which tokens or turns count."""
        if self.kind not in ("p_mem", "increment"):
            return True
        filtered = self.mask == "shared" or self.quantile is not None
        return filtered or (self.mask == "independent" and self.empty == "skip")


class Advantage(Section):
    """See ``advantages``. ``normalize_std`` speaks of the outcome, ``mem_normalize_std`` of the memory.

    Without it memories that are all alike have advantages near 0, not of unit variance. ``unit_variance``: on memory
    tokens outcome + memory is divided by its root mean square.
    """

    normalize_std: bool = True
    pool: Literal["question", "question_turn", "batch"] = "question"
    single: Literal["raw", "zero"] = "raw"
    std_floor: NonNegative = 0.0
    mem_normalize_std: bool = True
    unit_variance: bool = False
    mem_weight: NonNegative = 1.0
    anneal_rounds: Annotated[int, Field(ge=0)] = 0
    gate: Literal["none", "outcome_nonnegative", "outcome_correct"] = "none"
    aggregation: Literal["token-mean", "turn-mean", "trajectory-mean", "constant"] = "token-mean"
    flat_groups: Literal["keep", "drop"] = "keep"
    cut_off: Literal["keep", "drop"] = "keep"

    def weight_at(self, round_index: int) -> float:
        """mem_weight, falling linearly to 0 over ``anneal_rounds`` rounds where that is not 0."""
        if self.anneal_rounds == 0:
            return self.mem_weight
        return self.mem_weight * max(0.0, 1.0 - round_index / self.anneal_rounds)


class LossConfig(Section):
    """``sampler_correction``: importance weights up to ``sampler_cap`` a token or a turn, see ``mismatch``.

    ``max_mismatch``: the KL of sampler and policy, in nats a token, above which a run stops; null: never.
    """

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    kl_coef: NonNegative = 0.0
    old_logprobs: Literal["sampler", "recomputed"] = "sampler"
    sampler_correction: Literal["none", "token", "sequence"] = "none"
    sampler_cap: Annotated[float, Field(ge=1)] = 2.0
    max_mismatch: Annotated[float, Field(gt=0)] | None = 0.1

    @model_validator(mode="after")
    def _something_to_correct(self) -> LossConfig:
        if self.sampler_correction != "none" and self.old_logprobs == "sampler":
            raise ValueError(
                f"loss.sampler_correction: {self.sampler_correction} needs loss.old_logprobs: recomputed, "
                "the sampler's own have no ratio to themselves"
            )
        return self


class Optim(Section):
    """``decay_steps``: the learning rate falls linearly to a twentieth over so many steps; 0: it stays."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: NonNegative = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    minibatches: Count = 2
    tokens_per_microbatch: Count = 4096


class Lora(Section):
    """``rank`` 0: all weights are trained. Else W + alpha / rank * B A in the linear layers of the body, all of them or
    those that ``targets`` names (``q_proj``). The warm start trains all weights: LoRA concerns the rounds.
    """

    rank: Annotated[int, Field(ge=0, le=512)] = 0
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"


class Loop(Section):
    num_rounds: Count = 24
    questions_per_round: Count = 8
    group_size: Annotated[int, Field(ge=1)] = 8
    seed: int = 0
    dev_every: Annotated[int, Field(ge=0)] = 8
    keep_every: Annotated[int, Field(ge=0)] = 0
    curriculum: tuple[Phase, ...] = ()

    @model_validator(mode="after")
    def _phases_in_order(self) -> Loop:
        starts = [phase.from_round for phase in self.curriculum]
        if starts and (starts[0] != 0 or sorted(set(starts)) != starts):
            raise ValueError(f"loop.curriculum: from_round must begin at 0 and grow, got {starts}")
        return self


class Shards(Section):
    """Where the heavy work of a round is done: in the flow's own process, or by runs of a Prefect ``deployment``.

    Rollout and scoring are then shared out to ``count`` runs at a time, in whole blocks of questions; an update, a dev
    check or a diagnosis is one run. One that fails, is lost with its worker, or takes longer than ``deadline_s``
    once it has begun is replaced, until ``attempts`` have failed.
    """

    deployment: str | None = None
    count: Count = 1
    deadline_s: Annotated[float, Field(gt=0)] = 3600.0
    attempts: Count = 3


class Storage(Section):
    """``url``: where hosts without a common file system share their files; null: the workspace lies on one.

    ``lease_s``: how long a host that is gone keeps a run to itself.
    """

    url: Annotated[str | None, AfterValidator(_store)] = None
    lease_s: Annotated[float, Field(ge=3)] = 60.0


class Evaluation(Section):
    split: Literal["train", "dev", "test"] = "test"
    num_questions: Count = 256
    seed: int = 0
    temperature: Annotated[float, Field(gt=0)] = 1.0


class Tracking(Section):
    experiment: str = "mempo"
    figure_every: Count = 8


class Diagnose(Section):
    """Every so many rounds (0: never), known good and bad memories in the place of ``num_turns`` turns at most."""

    every: Annotated[int, Field(ge=0)] = 8
    num_turns: Count = 128


class Ablate(Section):
    """``variants`` x ``seeds`` x ``mixes``, ``workers`` trainings at a time; ``targets``: the EM whose cost is told.

    A variant is what a policy is: its differences from the settings above.
    """

    mixes: list[Mix] = Field(default=["easy"], min_length=1)
    seeds: list[int] = Field(default=[0], min_length=1)
    workers: Count = 2
    targets: dict[Mix, Share] = Field(default={"easy": 0.7, "hard": 0.4})
    baselines: list[PolicyName] = Field(default_factory=list)
    variants: dict[PolicyName, dict[str, Any]] = Field(default_factory=dict)


class Config(Section):
    data: Data = Data()
    model: Model = Model()
    prompt: Prompt = Prompt()
    format: Format = Format()
    warmstart: Warmstart = Warmstart()
    search: Search = Search()
    rollout: Rollout = Rollout()
    scoring: Scoring = Scoring()
    reward: Reward = Reward()
    mem_reward: MemReward = MemReward()
    advantage: Advantage = Advantage()
    loss: LossConfig = LossConfig()
    optim: Optim = Optim()
    lora: Lora = Lora()
    loop: Loop = Loop()
    shards: Shards = Shards()
    storage: Storage = Storage()
    evaluation: Evaluation = Evaluation()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()
    diagnose: Diagnose = Diagnose()
    ablate: Ablate = Ablate()
    preset: Literal["published"] | None = None
    policies: dict[PolicyName, dict[str, Any]] = Field(default_factory=dict)
    suites: dict[SuiteName, Suite] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _contexts_fit(self) -> Config:
        r, s = self.rollout, self.search
        kept = r.kept_turns
        turn = r.max_response_tokens + s.max_observation_tokens
        need = r.max_prompt_tokens + kept * turn + r.max_response_tokens
        if self.model.path is None and need > self.model.window:
            raise ValueError(
                f"model.window: a turn needs up to {need} tokens (rollout.max_prompt_tokens + {kept + 1} * "
                f"rollout.max_response_tokens + {kept} * search.max_observation_tokens), "
                f"the window holds {self.model.window}"
            )
        if r.context in ("full", "recent", "think") and self.format.require_memory:
            raise ValueError(f"format.require_memory: must be false where rollout.context is {r.context!r}")
        return self

    @model_validator(mode="after")
    def _what_is_asked_is_read(self) -> Config:
        s, m = self.scoring, self.mem_reward
        if m.discount < 1 and m.return_horizon == s.lookahead == 0:
            raise ValueError(
                f"mem_reward.discount: {m.discount} discounts nothing, "
                "mem_reward.return_horizon and scoring.lookahead are both 0"
            )
        other = "full_scorer" if s.full_scorer == "reference" else "baseline" if s.baseline == "seen" else None
        if other and self.uses_memory_reward and not m.reads_p_full:
            raise ValueError(f"scoring.{other}: does nothing where mem_reward.kind is {m.kind}, which reads no p_full")
        return self

    @model_validator(mode="after")
    def _something_to_search(self) -> Config:
        own = [file for split in self.data.splits.values() for file in split.files]
        read = [("data", self.data.corpus, _layouts(own, self.data.source))]
        for name, suite in self.suites.items():
            for key, asked in suite.datasets.items():
                read.append((f"suites.{name}.datasets.{key}", asked.corpus, _layouts(asked.files, asked.source)))
        for place, corpus, layouts in read:
            if layouts and layouts <= {"flashrag", "verl"} and not (corpus or self.search.urls):
                raise ValueError(
                    f"{place}.corpus: rows of flashrag and verl have no paragraphs; name a corpus, or search.urls"
                )
        return self

    @model_validator(mode="after")
    def _the_curriculum_has_questions(self) -> Config:
        asked = {number for phase in self.loop.curriculum for number in phase.objectives}
        if self.data.source != "geo" and (missing := sorted(asked - set(self.data.train.objectives))):
            raise ValueError(f"loop.curriculum: data.train.objectives has no questions of {missing[0]} objectives")
        return self

    @model_validator(mode="after")
    def _a_block_for_each_shard(self) -> Config:
        questions, size = self.loop.questions_per_round, self.rollout.block_questions
        blocks = questions if self.runtime.engine == "vllm" else -(-questions // size)
        if self.shards.count > blocks:
            raise ValueError(
                f"shards.count: {self.shards.count} runs, and a round of {questions} questions has {blocks} blocks of "
                f"rollout.block_questions: {size}"
            )
        return self

    @model_validator(mode="after")
    def _vllm_scores_at_temperature_one(self) -> Config:
        if self.runtime.engine == "vllm" and self.loss.kl_coef > 0 and self.rollout.temperature != 1:
            raise ValueError(
                f"runtime.engine: vllm scores at temperature 1 alone, and loss.kl_coef: {self.loss.kl_coef:g} needs it "
                f"at rollout.temperature: {self.rollout.temperature:g}"
            )
        return self

    @property
    def system(self) -> str:
        own = {"full": self.prompt.system_full, "recent": self.prompt.system_full, "think": self.prompt.system_think}
        return own.get(self.rollout.context, self.prompt.system)

    @property
    def uses_memory_reward(self) -> bool:
        return self.advantage.mem_weight > 0


def digest(value: Any, length: int = 8) -> str:
    """Short hash of a JSON value: the key of a run folder."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
