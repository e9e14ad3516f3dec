"""A hub name without a network ends in one sentence, without waiting."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from practicum.errors import RecipeError
from practicum.models import hub
from practicum.models.load_model import load_model, load_tokenizer, model_facts
from practicum.recipe.schema.recipe import Model, Task
from practicum.tasks.stream import make_stream

LOST = "which is neither a folder nor in the cache, and 127.0.0.1 can't be reached"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub at a port of this machine that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        if "datasets.config" in sys.modules:
            monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        hub._answers.cache_clear()
        yield
        hub._answers.cache_clear()


def test_a_model_of_the_hub(no_network: None):
    spec = Model(path="somebody/some-model")
    for read in (load_tokenizer, lambda s: load_model(s, 0), lambda s: model_facts(s, 8)):
        with pytest.raises(RecipeError) as caught:
            read(spec)
        found = f"found 'somebody/some-model', {LOST}"
        assert str(caught.value) == f"model.path: {found}, expected a folder, or a model of the hub."


def test_a_dataset_of_the_hub(no_network: None):
    with pytest.raises(RecipeError) as caught:
        make_stream({"t": Task(dataset="somebody/some-data")}, 0)
    found = f"found 'somebody/some-data', {LOST}"
    assert str(caught.value) == f"tasks.t.dataset: {found}, expected a folder, or a dataset of the hub."


def test_a_hub_that_is_not_to_be_asked_is_reported(no_network: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="nor in the cache, and HF_HUB_OFFLINE is set, expected"):
        load_tokenizer(Model(path="somebody/some-model"))


def test_a_hub_that_answers_is_used(no_network: None, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert not hub.is_unreachable("somebody/some-model")
    assert not constants.HF_HUB_OFFLINE
