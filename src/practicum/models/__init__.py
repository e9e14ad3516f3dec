"""Models and tokenizers: loaded from a folder or a hub, or made tiny on the spot; the attention seam.

The learner and the torch engine share one model object through what is here.
"""
