"""Chains on several processes: the (chain, data) mesh, and sums over members that live in different processes."""
