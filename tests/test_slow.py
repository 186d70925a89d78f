"""The list of tests that are left to `make test-all`."""

import ast

import pytest
from conftest import ROOT, SLOW


def defined(path):
    """Names of the functions and classes of a Python file, those of a class's methods with their class."""
    found = {""}  # a module's own doctest
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("line", sorted(SLOW))
def test_every_slow_test_exists(line):
    file, name = line.split("[")[0].split("::")
    assert (ROOT / file).is_file()
    if file.startswith("src/"):
        module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
        name = name.removeprefix(module).lstrip(".")
    assert name in defined(ROOT / file)


def test_the_list_is_sorted_and_has_no_line_twice():
    lines = (ROOT / "tests" / "slow.txt").read_text().splitlines()
    assert lines == sorted(SLOW)
