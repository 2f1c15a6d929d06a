"""What every other package stands on: geometry of layers, rounding, errors, baking, files, images, argument checks.

Nothing here imports another package of onelip.
"""
