"""Enumerate the legal plans of a host, model and workload, and rank those that fit."""
