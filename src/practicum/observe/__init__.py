"""The reports on a run: progress, trackers, the record of its rows, and the page that shows them."""
