"""Sharding rules and the dispatcher that applies them."""
