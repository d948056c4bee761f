"""What the committed notebooks hold. `pytest --nbmake notebooks` runs them; this writes them anew:

jupyter nbconvert --to notebook --execute --inplace \\
    --ExecutePreprocessor.record_timing=False notebooks/*.ipynb
"""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted(Path(__file__).resolve().parents[1].glob("notebooks/*.ipynb"))
OURS = ("glm5_jax", "pallas_kernels")
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:bin|builds?|data|etc|home|mnt|opt|private|proc|root|srv|tmp|usr|Users|var|work|"
    r"workspace)/|[A-Z]:\\\\|file://|site-packages"
)


def cells(notebook: Path) -> list[dict[str, Any]]:
    every = json.loads(notebook.read_text())["cells"]
    return [cell for cell in every if cell["cell_type"] == "code"]


def syntax(notebook: Path) -> Iterator[ast.AST]:
    for cell in cells(notebook):
        yield from ast.walk(ast.parse("".join(cell["source"])))


def imported(notebook: Path) -> Iterator[tuple[str, str, str]]:
    """Module, name and the name it has here, of what is imported from us; "" for the module."""
    for node in syntax(notebook):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name, alias.asname or alias.name


def test_there_are_five():
    assert [notebook.name[:2] for notebook in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda notebook: notebook.stem)
def notebook(request) -> Path:
    return request.param


def test_every_cell_was_run_once_and_in_order(notebook):
    counts = [cell["execution_count"] for cell in cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_output_is_an_error_or_a_warning(notebook):
    for cell in cells(notebook):
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", "".join(output["text"])
            assert "\\u001b" not in json.dumps(output)  # colours of a terminal


def test_no_path_of_a_machine(notebook):
    text = re.sub(r'"image/png": "[^"]*"', "", notebook.read_text())
    found = MACHINE_PATH.search(text)
    assert found is None, text[found.start() - 80 : found.end() + 80]


def test_outputs_are_small(notebook):
    for cell in cells(notebook):
        for output in cell["outputs"]:
            assert len(json.dumps(output)) < 160_000


def test_only_public_names(notebook):
    modules = {}
    for module, name, here in imported(notebook):
        if module.partition(".")[0] not in OURS:
            continue
        assert not any(part.startswith("_") for part in (*module.split("."), name)), (module, name)
        found = importlib.import_module(module)
        if name:
            assert name in getattr(found, "__all__", dir(found)), f"{module} has no public {name}"
        else:
            modules[here] = found
    for node in syntax(notebook):
        if isinstance(node, ast.Attribute):
            assert re.match(r"__|[^_]", node.attr), ast.unparse(node)
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                assert node.attr in modules[node.value.id].__all__, ast.unparse(node)
