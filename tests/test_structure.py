"""The package's rooms: what lives where, and which room imports which."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dualweaver
from dualweaver._moved import MOVED

ROOT = Path(dualweaver.__file__).parent
ROOMS = sorted(folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").is_file())
PUBLIC = ["DualWeaver", "DualWeaverError", "__version__", "load_backbone", "plan", "profile"]


def imported(file: Path) -> Iterator[str]:
    """Rooms and loose modules of ours that a file imports, anywhere in it, `TYPE_CHECKING` included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "dualweaver" else []
            names = names or [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("dualweaver."))


def arrows() -> dict[str, set[str]]:
    """From each room or loose module to what it imports, itself left out."""
    found: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        place = file.relative_to(ROOT).parts[0].removesuffix(".py")
        found.setdefault(place, set()).update(name for name in imported(file) if name != place)
    return found


def told(room: str) -> set[str]:
    """What the docstring of a room says that it may import."""
    text = importlib.import_module(f"dualweaver.{room}").__doc__ or ""
    found = re.search(r"May import: (.*?)\.\s*$", text, re.DOTALL)
    assert found, f"{room} does not say what it may import"
    return set(re.split(r",\s+", found[1]))


def test_few_modules_lie_loose_at_the_top():
    loose = [file.name for file in ROOT.glob("*.py")]
    assert len(loose) <= 8, loose


def test_no_room_imports_one_that_imports_it():
    left, order = arrows(), []
    left.pop("__init__")  # gathers the public names
    while left:
        free = sorted(place for place, uses in left.items() if not uses & set(left))
        assert free, f"these import each other in a circle: {left}"
        order += free
        for place in free:
            del left[place]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_its_docstring_says_and_nothing_else(room):
    assert arrows()[room] - {"_version"} == told(room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there_in_few_lines(room):
    text = importlib.import_module(f"dualweaver.{room}").__doc__ or ""
    assert len([line for line in text.splitlines() if line.strip()]) <= 4


def test_public_names_are_those_of_the_first_release():
    assert sorted(dualweaver.__all__) == sorted(PUBLIC)
    assert all(hasattr(dualweaver, name) for name in PUBLIC)


@pytest.mark.parametrize("old", sorted(MOVED))
def test_a_module_that_moved_is_found_by_its_old_name_with_a_notice(old):
    sys.modules.pop(f"dualweaver.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"dualweaver.{old} is now dualweaver"):
        module = importlib.import_module(f"dualweaver.{old}")
    for place in MOVED[old]:
        now = importlib.import_module(f"dualweaver.{place}")
        for name in now.__all__:
            assert getattr(module, name) is not None


def test_what_a_module_never_had_is_missing_under_its_old_name_too():
    sys.modules.pop("dualweaver.weaver", None)
    with pytest.warns(DeprecationWarning, match="is now"):
        module = importlib.import_module("dualweaver.weaver")
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        module.nothing_of_the_kind  # noqa: B018


def test_old_names_cost_nothing_unless_they_are_used():
    code = "import sys, dualweaver; print([n for n in sys.modules if n in " + repr([f"dualweaver.{n}" for n in MOVED])
    shown = subprocess.run([sys.executable, "-c", code + "])"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
