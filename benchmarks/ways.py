"""Names of the ways in which columns get from one process to another."""

OURS, ADAPTER = "store: ray", "store: transferqueue"
LEARNER = f"{OURS}, put by a learner"
"""What it puts may die with it, because the run does too: one copy less."""
PLAIN, BARE = "plain TransferQueue calls", "bare Ray objects"
MEMCPY, CALLS = "one memcpy", "two calls of nothing"
TENSORDICT, ARRAYS = "TensorDict", "packed arrays"
THROUGH = {form: f"through the controller, {form}" for form in (TENSORDICT, ARRAYS)}
"""By the form in which columns are sent."""
