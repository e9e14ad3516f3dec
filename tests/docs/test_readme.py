"""The recipe in the README is the recipe that the demo runs."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_demos_recipe():
    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    real = yaml.safe_load((ROOT / "recipes" / "mopd" / "student.yaml").read_text())
    assert yaml.safe_load(shown).items() <= real.items()
