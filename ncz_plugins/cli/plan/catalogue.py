"""The instances and costs that `ncz plan` knows, and those that users add."""

from __future__ import annotations

from datetime import date
from functools import lru_cache
from importlib.resources import files
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.config import first_problem, read_document
from ...core.errors import ConfigError
from .simulation.costs import Costs

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Entry(BaseModel):
    """What stands in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Instance(Entry):
    """A machine that can be rented.

    Attributes:
        gpus: in one machine.
        gpu: their name.
        tflops: of one of them, in 10^12 operations per second; None where no source says it.
        gbps: what a machine can send while it receives as much, in Gbit/s.
        flow_gbps: what one TCP connection can carry; None where nothing limits it.
        price: dollars per hour; None where no source says it.
        source: a key of `Catalogue.sources`.
    """

    gpus: Annotated[int, Field(ge=1)]
    gpu: str
    tflops: Positive | None = None
    gbps: Positive
    flow_gbps: Positive | None = None
    price: Positive | None = None
    source: str


class Source(Entry):
    """Where figures come from."""

    date: date
    text: str


class Catalogue(Entry):
    """All that is known, by name."""

    instances: dict[str, Instance] = {}
    costs: dict[str, Costs] = {}
    sources: dict[str, Source] = {}

    def instance(self, name: str, option: str) -> Instance:
        """Raises ConfigError for an unknown name, which stands in `option`."""
        return _named(self.instances, name, option)

    def cost(self, name: str) -> Costs:
        """Raises ConfigError for an unknown name."""
        return _named(self.costs, name, "--costs")


def _named(entries: dict, name: str, option: str):
    if name not in entries:
        raise ConfigError(f"{option} {name}: unknown; known are {', '.join(sorted(entries))}; --catalogue adds others")
    return entries[name]


def load(file: str | None = None) -> Catalogue:
    """What the package knows, and what a YAML file of the user's adds to it or replaces.

    Raises ConfigError that names the file and what is wrong, also where an instance names a source that is not there.
    """
    known = _own()
    if file is None:
        return known
    added = _checked(read_document(file), file)
    return _with_sources(
        Catalogue(
            instances=known.instances | added.instances,
            costs=known.costs | added.costs,
            sources=known.sources | added.sources,
        ),
        file,
    )


@lru_cache
def _own() -> Catalogue:
    text = files(__package__).joinpath("catalogue.yaml").read_text(encoding="utf-8")
    return _with_sources(_checked(yaml.safe_load(text), "catalogue.yaml"), "catalogue.yaml")


def _checked(document: object, file: str) -> Catalogue:
    try:
        return Catalogue.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{file}: {first_problem(error)}") from None


def _with_sources(catalogue: Catalogue, file: str) -> Catalogue:
    for name, instance in catalogue.instances.items():
        if instance.source not in catalogue.sources:
            raise ConfigError(
                f"{file}: instances.{name}.source: {instance.source} is not among sources: a figure without a source "
                "is not taken; add it there with date and text"
            )
    return catalogue
