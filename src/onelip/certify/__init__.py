"""From margins to certified radii."""
