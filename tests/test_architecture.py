"""Imports point one way only, the core stays pure, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import envrunner

PACKAGE = Path(envrunner.__file__).parent
LAYERS = {  # who may import whom, within the package
    "errors": set(),
    "_tree": set(),
    "_core": set(),
    "spaces": {"_tree"},
    "types": {"_tree"},
    "events": {"types"},
    "returns": set(),
    "buffer": {"_tree", "types"},
    "_as_policy": {"_tree", "errors", "types"},
    "_torch_policy": {"_tree", "_as_policy", "errors", "types"},
    "policy": {"_tree", "_as_policy", "_torch_policy", "_core", "errors", "types"},
    "_transport": {"_tree", "spaces"},
    "loops": {"_as_policy", "_tree", "_core", "_transport", "errors", "events", "policy", "spaces", "types"},
    "__init__": {"buffer", "errors", "events", "loops", "policy", "types"},  # for type checkers only
}
IMPURE = {
    "time",
    "threading",
    "os",
    "socket",
    "select",
    "subprocess",
    "signal",
    "torch",
    "gymnasium",
    "multiprocessing",
}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path, only_top_level=False):
    tree = ast.parse(path.read_text())
    for node in tree.body if only_top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    layer = layer_of(path)
    assert layer in LAYERS, f"{layer}: say in this test what it may import"
    for name in imports(path):
        if name.startswith("envrunner."):
            target = name.split(".")[1]
            assert target == layer or target in LAYERS[layer] or target not in LAYERS, f"{layer} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "_core").glob("*.py")), ids=lambda path: path.name)
def test_the_core_knows_no_process_clock_thread_or_torch(path):
    assert not {name.split(".")[0] for name in imports(path)} & IMPURE


def test_no_module_imports_torch_when_it_is_imported():
    for path in modules():
        if path.name != "_torch_policy.py":
            assert "torch" not in {name.split(".")[0] for name in imports(path, only_top_level=True)}, path


def test_importing_the_package_and_its_loops_loads_no_torch():
    code = (
        "import sys, envrunner; assert 'numpy' not in sys.modules; "
        "envrunner.MultiAgentEnvLoop, envrunner.AsyncPolicy, envrunner.TransitionBuffer; "
        "import envrunner.returns; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_resolves_and_unknown_ones_list_them():
    for name in envrunner.__all__:
        assert getattr(envrunner, name) is not None
    assert dir(envrunner) == envrunner.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Loop'; it has: .*MultiAgentEnvLoop"):
        envrunner.Loop  # noqa: B018
