"""Shared foundations: layer geometry, rounding, errors, baking, files, images and argument checks.

This package imports no other package of onelip.
"""
