"""Tests of the data plane. `conformance` is the suite that every store passes."""
