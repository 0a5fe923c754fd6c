"""Who may import whom (docs/architecture.md): read off the source, not off a run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("rlt_jax", "kernels", "checkpoints_convert")
    for path in (ROOT / folder).rglob("*.py")
)


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports; `from a import b` counts as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def under(folder: str) -> list[Path]:
    return [path for path in SOURCES if path.is_relative_to(ROOT / folder)]


def test_the_sources_are_found():
    assert len(under("rlt_jax/engine")) >= 6
    assert len(under("kernels")) >= 3


@pytest.mark.parametrize("path", under("rlt_jax/engine"), ids=lambda p: p.name)
def test_engine_imports_no_jax_no_runtime_no_models(path):
    banned = ("jax", "flax", "rlt_jax.runtime", "rlt_jax.models", "rlt_jax.kernels")
    for name in imports(path):
        assert not any(name == b or name.startswith(b + ".") for b in banned), name


@pytest.mark.parametrize(
    "path",
    under("rlt_jax/runtime") + under("rlt_jax/models") + under("kernels"),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_the_device_side_knows_only_the_batch_types_of_the_engine(path):
    for name in imports(path):
        if name.startswith("rlt_jax.engine"):
            assert path.is_relative_to(ROOT / "rlt_jax/runtime")
            assert name.startswith("rlt_jax.engine.types."), name


@pytest.mark.parametrize("path", under("rlt_jax/models") + under("kernels"), ids=lambda p: p.name)
def test_models_and_kernels_know_nothing_of_the_runtime(path):
    assert not any(name.startswith("rlt_jax.runtime") for name in imports(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_nobody_touches_private_names_or_asks_for_versions(path):
    for name in imports(path):
        parts = name.split(".")
        assert not any(part.startswith("_") and not part.startswith("__") for part in parts), name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "other")
            assert own or node.attr.startswith("__"), f"line {node.lineno}: {node.attr}"
    if path != ROOT / "kernels/compat.py":
        assert "jax.__version__" not in path.read_text()
