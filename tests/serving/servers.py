"""A real scoring server in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.processes.http_server import make_server
from practicum.serving.completions import RequestScorer, scoring_app
from practicum.serving.serve import listen

MODEL = "tiny"
MAX_BODY = 1 << 20


@dataclass(frozen=True)
class Served:
    url: str
    engine: TorchEngine


@contextmanager
def served(
    model: PreTrainedModel,
    *,
    context: int = 128,
    api_key: str | None = None,
    connections: int = 256,
    adapters: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """A server of a model under the name `tiny`, on a free port; its URL ends in /v1."""
    engine = TorchEngine(model, slots=1, context=context)
    vocab = model.config.get_text_config().vocab_size
    scorer = RequestScorer(engine, MODEL, context=context, vocab=vocab, adapters=adapters)
    app = scoring_app(scorer, dict.fromkeys(scorer.models, "here"), MAX_BODY, api_key)
    server = make_server(app, connections)
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}/v1", engine)
    finally:
        server.should_exit = True
        thread.join(30)
        bound.close()
    assert not thread.is_alive()
