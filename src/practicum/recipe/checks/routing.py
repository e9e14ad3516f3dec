"""Which values prompts are routed by, and which teachers take a value."""

from __future__ import annotations

from practicum.recipe.schema.recipe import Recipe, Task
from practicum.recipe.schema.teacher_sections import Route


def destinations(route: Route, value: str) -> dict[str, float]:
    """Teachers that take a value, with weights; a value that route.to does not list names its teacher."""
    found = route.to.get(value, value)
    return {found: 1.0} if isinstance(found, str) else found


def value_of_task(route: Route, name: str, task: Task) -> str | None:
    """The value of all of a task's prompts, if it is known without reading rows."""
    if route.by == "task":
        return name
    if route.by != "domain":
        return None
    # Rows of a file may bring a domain of their own.
    return task.domain or (name if task.kind is not None else None)


def values_of_tasks(recipe: Recipe) -> tuple[dict[str, list[str]], bool]:
    """Values that are known without reading rows, each with its tasks; and whether these are all."""
    values: dict[str, list[str]] = {}
    complete = True
    for name, task in recipe.tasks.items():
        value = value_of_task(recipe.route, name, task)
        if value is None:
            complete = False
        else:
            values.setdefault(value, []).append(name)
    return values, complete
