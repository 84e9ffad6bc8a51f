"""Prompt sets, provenance and what else `bastion bench` is made of."""
