"""Questions of several objectives of several hops over the world, and the splits that are fair to ask.

An *objective* is a chain of facts: Lyon's country is France, France's capital is Paris. Its answer is the last value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from random import Random

from mempo.config import Data
from mempo.data.geo import LINKS, Entity, Fact, Relation, World, heldout_countries, holders

# One digit an objective: its number of hops.
MIXES: dict[str, tuple[str, ...]] = {"easy": ("11", "12", "21", "111"), "hard": ("22", "112", "111", "122")}
# Among the relations of a mix, and of the general builder.
MIX_RELATIONS: frozenset[Relation] = frozenset({"capital", "currency", "phone-code", "country"})
MAX_SHARE = 0.04  # no answer is more frequent than this in a split's control objectives
# Names of the objectives, in questions and memories.
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
TRIES = 50  # draws of an objective and of a question before another hop pattern is tried; patterns before giving up
MAX_SHARERS = 4  # an answer that more entities share (Europe, Euro, +1) is no control objective


@dataclass(frozen=True)
class Objective:
    """Hops from the named entity to the answer; hop i + 1 starts at the value of hop i. ``ordinal`` names it."""

    facts: tuple[Fact, ...]
    ordinal: str = ""

    @property
    def entity(self) -> str:
        return self.facts[0].entity

    @property
    def answer(self) -> str:
        return self.facts[-1].value

    @cached_property
    def phrase(self) -> str:
        """``currency of the country of Lyon``"""
        return " of the ".join(fact.relation for fact in reversed(self.facts)) + f" of {self.entity}"


def question_text(objectives: Sequence[Objective]) -> str:
    """``What is first the capital of Norway; second the currency of the country of Lyon?``"""
    if len(objectives) == 1:
        return f"What is the {objectives[0].phrase}?"
    return "What is " + "; ".join(f"{objective.ordinal} the {objective.phrase}" for objective in objectives) + "?"


def numbered(objectives: Sequence[Objective], data: Data, random: Random) -> list[Objective]:
    """Named by ``data.ordinals``: by the first of them in order, or by a draw that ascends."""
    count = len(objectives)
    chosen = sorted(random.sample(range(data.ordinals), count)) if data.ordinals >= count > 1 else range(count)
    return [replace(o, ordinal=ORDINALS[place]) for o, place in zip(objectives, chosen, strict=True)]


def chains(world: World, start: Entity, num_hops: int) -> Iterator[tuple[Fact, ...]]:
    """All chains of ``num_hops`` facts from ``start`` that visit no entity twice and do not come back to one."""
    for relation, value in start.facts.items():
        fact = Fact(start.name, relation, value)
        if num_hops == 1:
            yield (fact,)
        elif relation in LINKS and value in world:
            for rest in chains(world, world[value], num_hops - 1):
                if start.name not in {name for hop in rest for name in (hop.entity, hop.value)}:
                    yield (fact, *rest)


class Composer:
    """Draws questions about the entities of ``countries``; ``usable`` says which names can be asked for."""

    def __init__(self, world: World, data: Data, countries: frozenset[str], usable: Callable[[str], bool]) -> None:
        self.data = data
        self.holders = holders(world, [value for entity in world.values() for value in entity.facts.values()])
        counts = Counter((r, value) for entity in world.values() for r, value in entity.facts.items() if r != "country")
        self.shared = {value for (relation, value), count in counts.items() if count > MAX_SHARERS}
        max_hops = data.max_hops if data.mix == "general" else 2
        # Drawn by path, then by country, then by entity: no answer is frequent only since its country has many cities.
        self.pool: dict[int, dict[tuple[Relation, ...], dict[str, list[Objective]]]] = {}
        for entity in world.values():
            for num_hops in range(1, max_hops + 1):
                for facts in chains(world, entity, num_hops):
                    if self._askable(world, facts, countries, usable):
                        path = tuple(fact.relation for fact in facts)
                        by_country = self.pool.setdefault(num_hops, {}).setdefault(path, {})
                        by_country.setdefault(entity.country, []).append(Objective(facts))

    def _askable(
        self, world: World, facts: Sequence[Fact], countries: frozenset[str], usable: Callable[[str], bool]
    ) -> bool:
        names = [facts[0].entity, *(fact.value for fact in facts)]
        inside = all(world[name].country in countries for name in names if name in world)
        known = self.data.mix == "general" or all(fact.relation in MIX_RELATIONS for fact in facts)
        told = any(_holds(a, b) for i, a in enumerate(names) for b in names[:i])
        return known and inside and not told and all(usable(name) for name in names)

    def draw(self, pattern: str, random: Random) -> list[Objective] | None:
        """Objectives that go together, each drawn until it fits those before it; none where that takes too long."""
        objectives: list[Objective] = []
        if any(int(num_hops) not in self.pool for num_hops in pattern):
            return None
        for _ in range(TRIES * len(pattern)):
            objective = self._objective(int(pattern[len(objectives)]), random)
            if self.needs_memory([*objectives, objective], len(pattern)):
                objectives.append(objective)
                if len(objectives) == len(pattern):
                    return objectives
        return None

    def _objective(self, num_hops: int, random: Random) -> Objective:
        by_path = self.pool[num_hops]
        by_country = by_path[random.choice(list(by_path))]
        return random.choice(by_country[random.choice(list(by_country))])

    def needs_memory(self, objectives: Sequence[Objective], num_objectives: int) -> bool:
        """No document holds the answers of two objectives or serves two, and the question tells none of them."""
        if num_objectives > 1 and any(objective.answer in self.shared for objective in objectives):
            return False
        seen: set[str] = set()
        for objective in objectives:
            reached = self.holders[objective.answer]
            if not seen.isdisjoint(reached):
                return False
            seen |= reached
        visited = [fact.entity for objective in objectives for fact in objective.facts]
        text = question_text(objectives)
        return len(set(visited)) == len(visited) and not any(_holds(text, o.answer) for o in objectives)


def _holds(text: str, name: str) -> bool:
    """Whether either text holds the other: Mexico City tells Mexico."""
    return name.lower() in text.lower() or text.lower() in name.lower()


def compose(
    composer: Composer,
    pattern_of: Callable[[Random], str],
    size: int,
    fewest: int,
    random: Random,
    taken: set[frozenset[str]],
) -> list[list[Objective]]:
    """``size`` new questions (``taken`` grows), no answer above ``MAX_SHARE`` of the control objectives.

    ``pattern_of`` draws a hop pattern of at least ``fewest`` objectives. Raises ``ValueError`` where the world cannot
    give as many.
    """
    quota = max(1, int(MAX_SHARE * size * fewest))
    used: Counter[str] = Counter()
    questions: list[list[Objective]] = []
    failed = 0
    while len(questions) < size:
        pattern = pattern_of(random)
        for _ in range(TRIES):
            objectives = composer.draw(pattern, random) or []
            key = frozenset(objective.phrase for objective in objectives)
            spread = len(pattern) == 1 or all(used[objective.answer] < quota for objective in objectives)
            if objectives and key not in taken and spread:
                taken.add(key)
                used.update(objective.answer for objective in objectives if len(pattern) > 1)
                questions.append(numbered(objectives, composer.data, random))
                failed = 0
                break
        else:
            failed += 1
            if failed > TRIES:
                raise ValueError(f"data: the world has no more than {len(questions)} of {size} questions to ask")
    return questions


def draw_pattern(data: Data, random: Random) -> str:
    """One of the mix's hop patterns; the general builder draws the number of objectives and of each one's hops."""
    if data.mix != "general":
        return random.choice(MIXES[data.mix])
    return "".join(str(random.randint(1, data.max_hops)) for _ in range(random.randint(1, data.max_objectives)))


def splits(world: World, data: Data, usable: Callable[[str], bool]) -> dict[str, list[list[Objective]]]:
    """train, dev, test. Dev and test ask about held-out entities only, train never does; no question occurs twice."""
    heldout = heldout_countries(world, data)
    others = frozenset(entity.country for entity in world.values()) - heldout
    inside, outside = Composer(world, data, others, usable), Composer(world, data, heldout, usable)
    taken: set[frozenset[str]] = set()
    pattern_of, fewest = partial(draw_pattern, data), min(map(len, MIXES.get(data.mix, "1")))
    return {
        name: compose(composer, pattern_of, size, fewest, Random(f"{data.seed}/{name}"), taken)
        for name, composer, size in (
            ("train", inside, data.num_train),
            ("dev", outside, data.num_dev),
            ("test", outside, data.num_test),
        )
    }
