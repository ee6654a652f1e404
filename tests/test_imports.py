"""The modules of the package: imports go in one direction, inside functions too; names; lengths."""

import ast
from pathlib import Path

import paged_ops

ROOT = Path(paged_ops.__file__).parent
TESTS = Path(__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported_by(name: str) -> set[str]:
    """The modules of the package that a module imports, for type checkers too: a submodule's package too, if the module
    lies outside of it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = []
            for alias in node.names:  # a submodule, or something that the module defines
                below = f"{node.module}.{alias.name}"
                names.append(below if below in MODULES else node.module)
        else:
            continue
        for each in names:
            package = each
            while package in MODULES and (package == each or not name.startswith(f"{package}.")):
                found.add(package)
                package = package.rpartition(".")[0]
    return found - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A path that comes back to its first module, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for each in sorted(graph.get(name, ())):
            if found := walk(each, [*path, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(graph))), [])


# From the bottom up; modules and folders that are not listed are at the bottom.
LAYERS = (
    *("lowerings", "cache", "metadata", "parallel", "graphs", "generation", "integrations"),
    *("testing", "bench", "cli", "__main__"),
)
LEFT = {  # to be removed
    ("paged_ops.masks", "paged_ops.features"),
}


def layer_of(name: str) -> int:
    folder = name.split(".")[1]
    return LAYERS.index(folder) + 1 if folder in LAYERS else 0


def test_no_module_imports_a_layer_above_it():
    inner = [name for name in MODULES if "." in name]
    upwards = {
        (name, ".".join(other.split(".")[:2]))
        for name in inner
        for other in imported_by(name) - {"paged_ops"}
        if layer_of(other) > layer_of(name)
    }
    assert upwards - LEFT == set()


def test_imports_form_no_circle():
    graph = {name: {each for each in imported_by(name) if (name, each) not in LEFT} for name in MODULES}
    assert sum(map(len, graph.values())) > 200, "the walk finds too few imports"
    assert circle(graph) == []


def test_a_circle_is_found():
    assert circle({"a": {"b", "c"}, "b": set(), "c": {"d"}, "d": {"a"}}) == ["a", "c", "d", "a"]


def test_no_two_modules_differ_by_a_plural():
    folders = {name.rpartition(".")[0] for name in MODULES}
    for folder in folders:
        here = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == folder}
        assert [name for name in here if f"{name}s" in here] == [], folder


def test_long_files_say_why():
    """Past 500 lines a file states at its top why it is not cut."""
    files = {path: path.read_text().splitlines() for path in ROOT.rglob("*") if path.suffix in (".py", ".cpp", ".h")}
    long = {path.name: lines[:25] for path, lines in files.items() if len(lines) > 500}
    assert [name for name, top in long.items() if not any("Longer than 500 lines" in line for line in top)] == []


def test_no_test_file_imports_another():
    """Shared helpers are modules of their own."""
    modules = {".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in TESTS.rglob("test_*.py")}
    found = set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                found |= {(path.name, module) for module in modules & named}
    assert found == set()
