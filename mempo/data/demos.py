"""Scripted demonstrations: how a turn looks, in worlds of shuffled facts, with memories that are not perfect.

Since no fact stays true, a policy can only learn to copy it. Since the memories lose things at stated rates, and the
demonstrator acts on what its memory says, there is something left for reinforcement learning to improve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from mempo import prompts
from mempo.config import Context, Warmstart
from mempo.data.compose import Objective
from mempo.data.geo import LINKS, Fact, Relation, World
from mempo.records import Action

UNKNOWN = "unknown"
# Words of the demonstrations that are no names: the tokenizer is trained on them too.
WORDS = [
    prompts.PROBE_HEAD + prompts.PROBE_TAIL,
    "What is first the capital of the; second the currency of the country of; third the phone-code of; fourth the?",
    "<mem>first country; second capital; third currency; fourth phone-code</mem>",
    f"<think>answer</think><answer>{UNKNOWN}; {UNKNOWN}</answer>",
]


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the memory: what hop ``hop`` of objective ``objective`` gave. ``second country France``"""

    objective: int
    ordinal: str
    hop: int
    last: bool
    relation: Relation
    value: str

    @property
    def text(self) -> str:
        return f"{self.ordinal} {self.relation} {self.value}"


def next_hop(objectives: Sequence[Objective], memory: Sequence[Item]) -> tuple[int, int, str] | None:
    """What the memory says is to be done: (objective, hop, whose document to read), or none: answer.

    It goes on after the latest item, so an older one that was lost is missed only in the answer.
    """
    if not memory:
        return 0, 0, objectives[0].entity
    last = memory[-1]
    if not last.last:
        return last.objective, last.hop + 1, last.value
    number = last.objective + 1
    return (number, 0, objectives[number].entity) if number < len(objectives) else None


def known_answers(items: Sequence[Item], num_objectives: int) -> str:
    """The values of the finished objectives in order, ``unknown`` where the items lack one."""
    done = {item.objective: item.value for item in items if item.last}
    return "; ".join(done.get(number, UNKNOWN) for number in range(num_objectives))


@dataclass(frozen=True, slots=True)
class Step:
    """One scripted turn: its text, the action in it, its memory, what was seen before it."""

    text: str
    segment: str
    action: Action
    argument: str
    memory: tuple[Item, ...]
    seen: tuple[Item, ...]


def play(
    world: World,
    objectives: Sequence[Objective],
    rates: Warmstart,
    random: Random,
    *,
    rule: Context,
    max_turns: int = 8,
) -> list[Step]:
    """The demonstrator at work on one question.

    Under ``full`` it has no memory and thinks aloud what it found last, under ``think`` all that a memory would hold.
    """
    rewrites = sum(len(objective.facts) for objective in objectives[1:])  # of memories that hold an older item
    drop_in = random.randrange(rewrites) if rewrites and random.random() < rates.drop_oldest else None
    memory: list[Item] = []
    seen: list[Item] = []
    steps: list[Step] = []
    for _ in range(max_turns):
        segment = f"<mem>{'; '.join(item.text for item in memory)}</mem>" if steps and rule == "memory" else ""
        aloud = {"full": memory[-1:], "think": memory}.get(rule, [])
        think = f"{segment}<think>{''.join(f'{item.text}; ' for item in aloud)}"
        target = next_hop(objectives, memory)
        if target is None:
            answer = known_answers(memory, len(objectives))
            text = f"{think}answer</think><answer>{answer}</answer>"
            return [*steps, Step(text, segment, "answer", answer, tuple(memory), tuple(seen))]
        number, hop, name = target
        fact, ordinal = objectives[number].facts[hop], objectives[number].ordinal
        text = f"{think}{ordinal} {fact.relation} of {name}</think><search>{name}</search>"
        steps.append(Step(text, segment, "search", name, tuple(memory), tuple(seen)))
        last = hop + 1 == len(objectives[number].facts)
        item = Item(number, ordinal, hop, last, fact.relation, world[name].facts[fact.relation])
        seen.append(item)
        older = [old for old in memory if old.objective != number]
        if older and rule != "full":
            older = [old for i, old in enumerate(older) if not (i == 0 == drop_in) and random.random() >= rates.forget]
            drop_in = None if drop_in is None else drop_in - 1
        memory = [*older, misread(item, world[name].facts, rates.wrong_field, random)]
    return steps


def misread(item: Item, facts: dict[Relation, str], rate: float, random: Random) -> Item:
    """With probability ``rate`` the value of another field of the same document."""
    others = [value for relation, value in facts.items() if relation != item.relation]
    return replace(item, value=random.choice(others)) if item.last and others and random.random() < rate else item


class Dealer:
    """Questions of a shuffled world: no entity is visited twice, no answer stands elsewhere in the question."""

    def __init__(self, world: World, relations: frozenset[Relation], random: Random) -> None:
        self.world, self.random = world, random
        self.owners: dict[Relation, list[str]] = {}
        for name, entity in world.items():
            for relation in entity.facts:
                if relation in relations:
                    self.owners.setdefault(relation, []).append(name)
        self.links = [relation for relation in LINKS if relation in self.owners]

    def objectives(self, pattern: str) -> list[Objective]:
        while True:
            drawn = [Objective(facts) for facts in map(self._chain, map(int, pattern)) if facts]
            names = [name for o in drawn for name in (*(fact.entity for fact in o.facts), o.answer)]
            if len(drawn) == len(pattern) and len(set(names)) == len(names):
                return drawn

    def _chain(self, num_hops: int) -> tuple[Fact, ...]:
        """Empty where a link leads to an entity that has nothing to go on with."""
        relation = self.random.choice(self.links if num_hops > 1 else list(self.owners))
        name = self.random.choice(self.owners[relation])
        facts: list[Fact] = []
        while True:
            facts.append(Fact(name, relation, self.world[name].facts[relation]))
            if len(facts) == num_hops:
                return tuple(facts)
            name = facts[-1].value
            known = [r for r in (self.world[name].facts if name in self.world else ()) if r in self.owners]
            options = [r for r in known if len(facts) + 1 == num_hops or r in self.links]
            if not options:
                return ()
            relation = self.random.choice(options)
