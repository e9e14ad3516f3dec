"""Tests of the algorithms: hand-computed numbers, slow references, laws on ragged batches."""
