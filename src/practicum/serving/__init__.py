"""Serve a model over HTTP, for teachers on another machine or shared by several runs."""
