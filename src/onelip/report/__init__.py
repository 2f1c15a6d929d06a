"""Pictures of what was computed. matplotlib is needed here and nowhere else: pip install 'onelip[plots]'."""
