"""Catalogue of instances and costs: those that come with `ncz plan`, and those that users add."""

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
    """Part of a catalogue file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Instance(Entry):
    """Machine that can be rented.

    Attributes:
        gpus: number of GPUs in the machine.
        gpu: name of the GPU.
        tflops: peak of one GPU in 10^12 operations per second; None if no source states it.
        gbps: rate at which the machine can send and receive at the same time, in Gbit/s.
        flow_gbps: limit of one TCP connection in Gbit/s; None for no limit.
        price: dollars per hour; None if no source states it.
        source: key in `Catalogue.sources`.
    """

    gpus: Annotated[int, Field(ge=1)]
    gpu: str
    tflops: Positive | None = None
    gbps: Positive
    flow_gbps: Positive | None = None
    price: Positive | None = None
    source: str


class Source(Entry):
    """Source of numbers."""

    date: date
    text: str


class Catalogue(Entry):
    """Instances, costs and sources, each by name."""

    instances: dict[str, Instance] = {}
    costs: dict[str, Costs] = {}
    sources: dict[str, Source] = {}

    def instance(self, name: str, option: str) -> Instance:
        """The instance of this name. Raises ConfigError for an unknown name, which `option` gave."""
        return _named(self.instances, name, option)

    def cost(self, name: str) -> Costs:
        """The costs of this name. Raises ConfigError for an unknown name."""
        return _named(self.costs, name, "--costs")


def _named(entries: dict, name: str, option: str):
    if name not in entries:
        raise ConfigError(f"{option} {name}: unknown; known are {', '.join(sorted(entries))}; --catalogue adds others")
    return entries[name]


def load(file: str | None = None) -> Catalogue:
    """The catalogue of the package, extended by a YAML file of the user, whose entries replace those of the same name.

    Raises ConfigError, naming the file and the problem, also if an instance names a source that does not exist.
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
                f"{file}: instances.{name}.source: {instance.source} is not in sources: every number needs a source; "
                "add it there with date and text"
            )
    return catalogue
