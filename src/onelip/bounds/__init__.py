"""Proofs of Lipschitz constants. So far: what is known of single modules without looking at their weights."""
