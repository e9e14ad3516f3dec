"""Serving: a model behind a URL, for recipes whose teacher is on another machine or shared by runs."""
