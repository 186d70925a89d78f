"""A small Flower project for an experiment: what `fedbayes deploy new` writes, from the templates in project/."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jinja2

from fedbayes import files
from fedbayes.algorithms import REGISTRY, find
from fedbayes.errors import UserError

FILES = ("pyproject.toml", "README.md", "federation/app.py", "federation/experiment.py")


def write_project(folder: Path, algorithm: str, sites: int, rounds: int) -> list[Path]:
    """The files of a project; a folder that is there is left alone."""
    cls = find(algorithm)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is there and not empty; choose another folder")
    if sites < 1 or rounds < 1:
        raise UserError(f"sites is {sites} and rounds {rounds}; both are at least 1")
    name = "".join(letter if letter.isalnum() else "-" for letter in folder.resolve().name.lower()).strip("-") or "federation"
    trains, network = any(field.name == "train" for field in dataclasses.fields(cls)), REGISTRY[algorithm].kind == "clients"
    values = {"name": name, "cls": cls.__name__, "sites": sites, "rounds": rounds, "trains": trains, "network": network}
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "project")
    templates = jinja2.Environment(loader=loader, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    texts = {path: templates.get_template(f"{Path(path).name}.jinja").render(values) for path in FILES}
    texts["federation/__init__.py"] = ""
    for path, text in texts.items():
        files.write(files.make_folder((folder / path).parent) / Path(path).name, text.encode())
    return [folder / path for path in texts]
