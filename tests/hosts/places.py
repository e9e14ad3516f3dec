"""Print where a recipe's actors would run: `python -m tests.hosts.places RECIPE.yaml ROLE …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray

from practicum.recipe.load_recipe import load_recipe
from practicum.runtime.ray.cluster import Cluster


def main() -> None:
    recipe, roles = load_recipe(Path(sys.argv[1])).recipe, sys.argv[2:]
    cluster = Cluster.open(recipe)
    try:
        address = ray.remote(ray.util.get_node_ip_address)
        actors = [actor for actor in cluster.needs.actors if actor.role in roles]
        calls = []
        for actor in actors:
            options = cluster.options(actor.role, actor.index)
            calls.append(
                address.options(**{k: v for k, v in options.items() if k != "max_restarts"}).remote()
            )
        places = ray.get(calls, timeout=120)
    finally:
        cluster.close()
    print(json.dumps([[actor.role, place] for actor, place in zip(actors, places, strict=True)]))


if __name__ == "__main__":
    main()
