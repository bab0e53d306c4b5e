"""Drafts of the tokens to come, from texts that are known already, and how many of them to verify."""
