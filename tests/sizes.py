"""Print the size of the code base beside its targets: `python -m tests.sizes`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(folder: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def naming(trees: dict[Path, ast.Module], name: str, own: str = "-") -> list[str]:
    """Return the files that name something: a text that is this name, or a function of it. Whoever adds
    another of its kind may have to edit them. Files below its `own` folder are left out."""
    found = []
    for path, tree in trees.items():
        nodes = list(ast.walk(tree))
        texts = any(isinstance(node, ast.Constant) and node.value == name for node in nodes)
        if own not in str(path) and (texts or any(isinstance(n, Function) and n.name == name for n in nodes)):
            found.append(str(path.relative_to(ROOT / "src/practicum")))
    return found


def show(what: str, value: object, target: str = "") -> None:
    print(f"{what:<52} {value!s:>8}  {f'target {target}' if target else ''}".rstrip())


def main() -> None:
    source = files("src")
    trees = {path: ast.parse(path.read_text()) for path in source}
    defined = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in defined]
    parameters = [
        a for node in defined for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    ]
    whole = sum(ast.unparse(a.annotation) == "Recipe" for a in parameters if a.annotation)
    outside = "".join(p.read_text() for p in source if not p.is_relative_to(ROOT / "src/practicum/engines"))
    text = "".join(path.read_text() for path in source)
    show("source lines", f"{lines(source):,}", "38,000")
    show("source files, and those under 60 lines", f"{len(source)}, {sum(lines([p]) < 60 for p in source)}")
    show("test lines", f"{lines(files('tests')):,}", "38,000")
    show("benchmark lines", f"{lines(files('benchmarks')):,}", "3,000")
    show("functions, and their median lines", f"{len(defined):,}, {median(lengths):g}")
    show("`recipe: Recipe` parameters", whole, "under 80")
    show(
        "comparisons with an engine's name outside engines/",
        len(re.findall(r'[=!]= "(?:vllm|torch)"', outside)),
    )
    show(
        "isinstance on engines or teachers",
        len(re.findall(r"isinstance\([^)]*(?:Engine|Teacher|Place)\b", text)),
    )
    for what, name, own, target in (
        ("engine (vllm)", "vllm", "engines/vllm", "4"),
        ("teacher placement (colocated)", "colocated", "-", "4"),
        ("reward function (contains)", "contains", "-", "2"),
    ):
        found = naming(trees, name, own)
        show(f"files that name a {what}", len(found), target)
        print(f"  {', '.join(found)}")
    _run(
        "recipe keys (target 190)",
        "from practicum.recipe.text.type_text import recipe_keys; print(len(recipe_keys()))",
    )
    _run("call frames", "from tests.frames import main; main()")


def _run(title: str, code: str) -> None:
    """Print what needs the package's own modules, in a separate process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    print(f"{title}: {done.stdout.strip() or done.stderr.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
