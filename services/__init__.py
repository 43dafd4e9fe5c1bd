"""Galley: speculative decoding served as microservices. Start at docs/architecture.md."""
