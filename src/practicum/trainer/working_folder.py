"""The folder that a run was started in: relative paths mean the same until its end."""

from __future__ import annotations

import os
from collections.abc import Callable


class WorkingFolder:
    """Goes back to where it was made, if code of the user's has gone elsewhere, and tells the first time."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._home, self._report, self._has_told = os.getcwd(), report, False

    def return_to(self) -> None:
        """Be there again."""
        try:
            here = os.getcwd()
        except FileNotFoundError:
            here = "a folder that is gone"
        if here == self._home:
            return
        os.chdir(self._home)
        if not self._has_told:
            self._has_told = True
            self._report(
                f"a reward, loop or tool has changed the working folder to {here}: it is set back after each "
                "stage, so that the recipe's paths stay what they are"
            )
