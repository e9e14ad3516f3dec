"""The table of traits has the algorithms that there are, and nothing else knows them by name."""

import ast
from pathlib import Path

import pytest

import practicum
from practicum.algorithms.advantages.registry import ADVANTAGES
from practicum.algorithms.policy_losses.registry import POLICY_LOSSES
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES, readers
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.text.type_text import choices

ROOT = Path(practicum.__file__).parent
NAMED_IN = {
    "recipe/algorithm_traits.py",
    "recipe/schema/algorithm_sections.py",
    "algorithms/advantages/registry.py",
    "algorithms/policy_losses/registry.py",
}


@pytest.mark.parametrize(
    ("table", "registry", "key", "besides"),
    [(ESTIMATORS, ADVANTAGES, "advantage", "none"), (LOSSES, POLICY_LOSSES, "loss", "supervised")],
)
def test_traits_registry_and_schema_have_the_same_names(table, registry, key, besides):
    assert set(table) == {*registry, besides}
    assert set(choices(Algorithm.model_fields[key].annotation)) == set(table)


def test_options_that_are_read_are_keys_of_the_recipe():
    options = {option for table in (ESTIMATORS, LOSSES) for one in table.values() for option in one.reads}
    assert options < set(Algorithm.model_fields)
    assert readers("gamma") == ["gae", "reinforce_pp"]


def test_no_other_file_compares_with_the_name_of_an_algorithm():
    names = {*ADVANTAGES, *POLICY_LOSSES}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) not in NAMED_IN
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []
