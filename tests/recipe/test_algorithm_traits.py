"""The table of traits has the algorithms that there are, and nothing else knows them by name."""

import ast
from pathlib import Path

import practicum
from practicum.algorithms.advantages import ADVANTAGES
from practicum.algorithms.losses import POLICY_LOSSES
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES, readers
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.text.type_text import choices

ROOT = Path(practicum.__file__).parent
NAMED_IN = {
    "recipe/algorithm_traits.py",
    "recipe/schema/algorithm_sections.py",
    "recipe/schema/other_trainers.py",  # these are other trainers' names for losses and advantages
}


def test_recipe_keys_have_the_names_of_the_table():
    for key, table in (("advantage", ESTIMATORS), ("loss", LOSSES)):
        assert set(choices(Algorithm.model_fields[key].annotation)) == set(table)


def test_options_that_are_read_are_keys_of_the_recipe():
    options = {option for table in (ESTIMATORS, LOSSES) for one in table.values() for option in one.reads}
    assert options < set(Algorithm.model_fields)
    assert readers("gamma") == ["gae", "reinforce_pp"]
    assert readers("lam") == ["gae"]


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
