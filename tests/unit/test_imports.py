# SPDX-License-Identifier: Apache-2.0
"""Which file imports which: no cycle, one direction, and no more in a rank than it needs."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"lmcache_ec": ROOT / "lmcache_ec", "lmcache_ec.adapters": ROOT / "adapters"}


def modules() -> dict[str, Path]:
    """Import name -> file."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


@cache
def imported(name: str, file: Path) -> list[str]:
    """Every module that a file imports, anywhere: even in a function, or only for type checkers."""
    package, found = name if file.name == "__init__.py" else name.rpartition(".")[0], list[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Module -> our modules that it imports: the imported module itself, or the one that contains the imported name."""
    files = modules()
    edges: dict[str, set[str]] = {}
    for name, file in files.items():
        named = (each if each in files else each.rpartition(".")[0] for each in imported(name, file))
        edges[name] = {each for each in named if each in files and each != name}
    return edges


def reach(edges: dict[str, set[str]], start: str) -> set[str]:
    found, coming = set[str](), [start]
    while coming:
        new = edges[coming.pop()] - found
        found |= new
        coming += new
    return found


def test_nothing_uses_a_random_generator_that_others_seed() -> None:
    """vLLM seeds those of `random` and numpy alike on all replicas: values that have to differ there would not."""
    own = {"random.Random", "random.SystemRandom"}
    for name, file in modules().items():
        drawn = {each for each in imported(name, file) if each.partition(".")[0] == "random"} - own
        drawn |= set(re.findall(r"\b(?:np|numpy)\.random\.(?!default_rng\b|Generator\b)\w+", file.read_text()))
        assert not drawn, f"{name}: {drawn}"


def test_no_import_cycle_among_the_files() -> None:
    edges = graph()
    assert {"lmcache_ec.adapters.vllm.worker", "lmcache_ec.rank"} <= edges.keys()
    assert "lmcache_ec.adapters.vllm.copier" in edges["lmcache_ec.adapters.vllm.worker"], "relative imports count"
    assert "lmcache_ec.tiers.s3" in edges["lmcache_ec.tiers.s3_kind"], "so do those within functions"
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_imports_go_one_way_adapters_to_cache_to_tiers() -> None:
    edges = graph()
    for name in edges:
        if name.startswith(("lmcache_ec.adapters", "lmcache_ec.cli")):  # the command line may import everything
            continue
        reached = reach(edges, name)
        assert not any(each.startswith("lmcache_ec.adapters") for each in reached), name
        if name.startswith("lmcache_ec.tiers."):
            upper = {"lmcache_ec.cache", "lmcache_ec.store", "lmcache_ec.channel", "lmcache_ec.config"}
            assert not upper & reached, name


def test_a_rank_needs_neither_the_book_nor_the_store() -> None:
    reached = reach(graph(), "lmcache_ec.adapters.vllm.worker")
    assert not {"lmcache_ec.book", "lmcache_ec.space", "lmcache_ec.cache", "lmcache_ec.store"} & reached


def test_only_tests_import_from_the_tests() -> None:
    """Code shared by tests and benchmarks is in `benchmarks/testbed`."""
    folders = {"benchmarks": ROOT / "benchmarks", **FOLDERS}
    ours = {file: name for name, file in modules().items()}
    files = [(ours.get(file, package), file) for package, folder in folders.items() for file in folder.rglob("*.py")]
    assert len(files) > 100
    wrong = [str(file) for package, file in files for each in imported(package, file) if each.split(".")[0] == "tests"]
    assert not wrong
