"""The campaign: processes of runs are killed and stopped at random points, recipes and requests are fuzzed.

`python -m tests.campaign` kills, `python -m tests.campaign.fuzz` fuzzes, `python -m tests.campaign.soak`
watches a long run. Results are in `results/`; docs/reliability.md has their tables.
"""
