"""Write what follows from the registry: the package's type stub, README's table and the reference page of algorithms.

`make tables` runs it; a test checks that the files are current.
"""

from pathlib import Path

import fedbayes
from fedbayes.algorithms import REGISTRY, find, module_of, names

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- methods: make tables -->\n", "<!-- end of methods -->\n"


def stub() -> str:
    """The public names, for type checkers and editors."""
    names = [("fedbayes", name) for name in fedbayes.MODULES]
    names += [(f"fedbayes.{module}", name) for module, public in fedbayes.NAMES.items() for name in public]
    imports = [f"from {module} import {name} as {name}" for module, name in sorted(names)]
    about = '"""Written by `make tables`, from the registry and the names in `__init__.py`."""'
    return "\n".join([about, "", *imports, "", "__version__: str", ""])


def readme() -> str:
    """README with its table of methods."""
    lines = ["| name | shared | stays with the client | reference |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {entry.shared} | {entry.local} | {entry.reference} |" for name, entry in REGISTRY.items()]
    *most, last = (f"`{name}`" for name in names("silos"))
    silos = (
        f"{', '.join(most)} and {last} fit a NumPyro model over silos (`fedbayes fit`); the others train a network over clients"
    )
    text = (ROOT / "README.md").read_text("utf-8")
    before, after = text[: text.index(START)], text[text.index(END) :]
    return before + START + "\n".join(["", *lines, "", f"{silos} (`fedbayes run`).", "", after])


def reference() -> str:
    """The reference page: a table of all methods, then each module."""
    lines = ["# Algorithms", "", "| name | what it does | runs over | rounds by default |", "|---|---|---|---|"]
    for name, entry in REGISTRY.items():
        rounds = find(name).default_rounds
        lines.append(f"| [{name}][fedbayes.{module_of(name)}] | {entry.summary} | {entry.kind} | {rounds} |")
    return "\n".join([*lines, *(f"\n::: fedbayes.{module_of(name)}" for name in REGISTRY), ""])


FILES = {"src/fedbayes/__init__.pyi": stub, "README.md": readme, "docs/reference/algorithms.md": reference}

if __name__ == "__main__":
    for path, text in FILES.items():
        (ROOT / path).write_text(text(), "utf-8")
