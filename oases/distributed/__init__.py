"""Meshes, pipeline stages, replicas and sharded weights over process groups."""
