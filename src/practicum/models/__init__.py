"""Models and tokenizers: loaded from a folder or hub, or randomly initialised. Also the attention interface.

The learner and the torch engine share one model object.
"""
