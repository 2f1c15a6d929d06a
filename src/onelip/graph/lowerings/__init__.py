"""Rules that lower calls to nodes; importing this package registers them."""

from onelip.graph.lowerings import (
    activations as activations,
    arithmetic as arithmetic,
    linear as linear,
    movement as movement,
    pooling as pooling,
)
