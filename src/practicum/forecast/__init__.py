"""The memory that a recipe needs on a cluster, and who sits where: `practicum plan`. Needs no Ray."""
