"""Agents in pods of a Kubernetes cluster."""
