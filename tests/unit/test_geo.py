"""The world: real facts, one document an entity, whole countries held out."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from mempo.config import Data
from mempo.data.geo import World, build_world, heldout_countries, holders, shuffled


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(Data())


def test_real_facts(world: World) -> None:
    assert world["France"].facts == {
        "capital": "Paris",
        "currency": "Euro",
        "phone-code": "33",
        "continent": "Europe",
        "neighbour": "Spain",  # the largest by area
    }
    assert world["Marseille"].facts == {"country": "France", "continent": "Europe"}
    assert world["Marseille"].document.text == "Marseille: country France, continent Europe."


def test_sizes_and_caps(world: World) -> None:
    cities = [entity for entity in world.values() if "country" in entity.facts]
    assert (len(world), len(cities)) == (688, 500)
    assert max(Counter(entity.country for entity in cities).values()) == 20
    assert len({entity.doc_id for entity in world.values()}) == len(world)
    assert all(entity.country in world for entity in cities)


def test_names_are_plain_and_capitals_are_no_city_of_their_own(world: World) -> None:
    names = [name for entity in world.values() for name in (entity.name, *entity.facts.values())]
    assert all(name.isascii() and name == " ".join(name.split()) and ";" not in name for name in names)
    capitals = {entity.facts["capital"] for entity in world.values() if "capital" in entity.facts}
    assert not capitals & {entity.name for entity in world.values() if "country" in entity.facts}


def test_a_fifth_of_the_whole_world_is_held_out(world: World) -> None:
    heldout = heldout_countries(world, Data())
    share = sum(entity.country in heldout for entity in world.values()) / len(world)
    assert share == pytest.approx(0.2, abs=0.005)  # 137 or 138 of 688
    assert heldout == heldout_countries(world, Data())
    assert heldout != heldout_countries(world, Data(seed=1))


def test_a_shuffled_world_deals_the_same_values_to_others(world: World) -> None:
    def short(name: str) -> bool:
        return " " not in name

    dealt = shuffled(world, Random(0), short)
    assert all(short(name) for entity in dealt.values() for name in (entity.name, *entity.facts.values()))
    kept = [entity for entity in world.values() if short(entity.name)]
    before = Counter(entity.facts["capital"] for entity in kept if short(entity.facts.get("capital", " ")))
    after = Counter(entity.facts["capital"] for entity in dealt.values() if "capital" in entity.facts)
    assert after == before
    moved = [name for name in dealt if dealt[name].facts.get("country") != world[name].facts.get("country")]
    assert len(moved) > 300


def test_holders_look_for_whole_words(world: World) -> None:
    found = holders(world, ["Niger", "France"])
    assert "Nigeria" not in found["Niger"] and "Niger" in found["Niger"]
    assert {"France", "Marseille", "Spain"} <= found["France"]  # its own document, a city's, a neighbour's
